"""Replaces `gated_delta_update`, the function through which models of mlx-lm and mlx-vlm run their recurrence.

Each call is routed to deltatune, to the original function, or to the original's forward pass with deltatune's backward
pass. The module also counts how many calls each of the three served.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..ops.gated_delta import gated_delta, native
from ..ops.gated_delta.choice import OPERATOR
from ..ops.gated_delta.trial_case import Call
from ..ops.operator import candidates
from ..ops.pointwise import gating
from ..ops.tracing import dispatch, trace
from .whole_rows import OURS, PROMPT_TOKENS, UPSTREAM, note_call, of_a_row

# Who may serve a call, besides OURS and UPSTREAM: the three are the keys of the counter that served() returns.
BACKWARD = "upstream forward, deltatune backward"

Update = Callable[..., tuple[mx.array, mx.array]]

_ARRAYS = ("q", "k", "v", "a", "b", "A_log", "dt_bias")
# Parameters that only some versions of the original function have: options of the gates, each with a value to try, and
# those of decoding.
OPTIONS = {"lower_bound": -5.0, "allow_neg_eigval": True}
_DECODING = ("state_steps", "cache", "cache_index")
# All parameters that the replacement knows.
PARAMETERS = (*_ARRAYS, "state", "mask", "use_kernel", *OPTIONS, *_DECODING)


def served() -> Counter[str]:
    """How many calls of patched functions each of OURS, BACKWARD and UPSTREAM served since the last reset().

    A compiled function counts once per trace, however often it runs.
    """
    return Counter(dispatch.current().recurrences)


def update(upstream: Update) -> Update:
    """Build the replacement of a `gated_delta_update`, with the signature of that version.

    A call that decodes or verifies with a cache of its own goes to the original function. While it runs, its calls to
    its own (now replaced) name go to the original as well.
    """
    signature = inspect.signature(upstream)
    place = list(signature.parameters).index("state")

    @functools.wraps(upstream)
    def gated_delta_update(*arguments: Any, **keywords: Any) -> Any:
        told = trace.current()
        if told.to_upstream:
            return count(UPSTREAM, upstream(*arguments, **keywords))
        if keywords.get("cache") is not None:
            # A decoder of mlx-vlm gives its cache with each token. It does not wait for bind(), which takes time.
            return _by_upstream(upstream, arguments, keywords)
        decoding = not told.whole_rows and told.segments is None
        if decoding and place <= len(arguments) <= place + 2 and arguments[0].shape[1] == 1:
            # This is a decoder's next token. route() would send it to the original function too, after bind().
            state = arguments[place] if len(arguments) > place else keywords.get("state")
            if state is not None and "cache" not in keywords:
                return count(UPSTREAM, upstream(*arguments, **keywords))
        bound = signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        values = bound.arguments
        if any(values.get(name) is not None for name in ("state_steps", "cache")):
            return _by_upstream(upstream, bound.args, bound.kwargs)
        arrays = tuple(values[name] for name in _ARRAYS)
        options = {name: values[name] for name in OPTIONS if name in values}
        return route(upstream, arrays, values["state"], values["mask"], values["use_kernel"], options)

    return gated_delta_update


def _by_upstream(upstream: Update, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[mx.array, mx.array]:
    """Let the original function serve a call, and the calls that it makes to its own name."""
    with trace.having(to_upstream=True):
        return count(UPSTREAM, upstream(*arguments, **keywords))


def route(
    upstream: Update,
    arrays: tuple[mx.array, ...],
    state: mx.array | None,
    mask: mx.array | None,
    use_kernel: bool,
    options: dict[str, Any],
) -> tuple[mx.array, mx.array]:
    """Serve one call of gated_delta_update by deltatune, by the original function, or by both.

    - Training (`use_kernel` is False) goes to deltatune.
    - Decoding goes to the original: a state is given, and there is one token or `use_kernel` is True.
    - Every other call runs the original's forward pass, with deltatune's backward pass for its gradient.
    - Off Metal, where the original loops over tokens, prompts count as training.

    `arrays` are q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], a, b, A_log and dt_bias, and `options` those of the gates. A
    state [B, Hv, Dv, Dk] beside packed documents raises ValueError, unless a piece of the same row hands it on.
    """
    use_kernel = use_kernel and (not native.loops() or arrays[0].shape[1] < PROMPT_TOKENS)
    told = trace.current()
    documents = told.segments
    if documents is not None:
        if state is not None and told.piece is None:
            raise ValueError("gated_delta_update: packed documents start without a state; pass no cache with segments.")
        return count(OURS, _ours(arrays, state=state, mask=mask, documents=documents, **options), (arrays, options))
    if state is not None and (use_kernel or arrays[0].shape[1] == 1):
        return count(UPSTREAM, upstream(*arrays, state, mask, use_kernel=use_kernel, **options))
    if use_kernel:
        return count(BACKWARD, _upstream_forward(upstream, arrays, mask, options), (arrays, options))
    return count(OURS, _ours(arrays, state=state, mask=mask, documents=None, **options), (arrays, options))


def count(who: str, result: tuple[mx.array, mx.array], call: Any = None) -> tuple[mx.array, mx.array]:
    """Count a call as served by `who`, and return its `result`; `call` is its arrays and options where ours serves."""
    return counted("gated delta", who, result, None if call is None else lambda: _implementation(*call))


def counted(
    operator: str, who: str, result: tuple[mx.array, mx.array], implementation: Callable[[], str] | None = None
) -> tuple[mx.array, mx.array]:
    """Count a call of an operator as served by `who`, and return its `result`; `implementation` names ours."""
    told = dispatch.current()
    told.recurrences[who] += 1
    if told.callers is not None:
        note_call(operator, implementation)
    return result


def _implementation(arrays: tuple[mx.array, ...], options: dict[str, Any]) -> str:
    """Name the implementation of a call with these arrays and options in training."""
    q, k, v, a = of_a_row(arrays[:4])
    log_g = gating.log_gate(arrays[5], a, arrays[6], options.get("lower_bound"))
    return candidates.choose(OPERATOR, Call(q, k, v, log_g, masked=False, segmented=False))[0]


def _ours(
    arrays: tuple[mx.array, ...],
    *,
    state: mx.array | None,
    mask: mx.array | None,
    documents: mx.array | None,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """gated_delta with gates computed from the layer's parameters, in log space throughout; `arrays` as in update()."""
    q, k, v, a, b, A_log, dt_bias = arrays
    largest_beta = 2.0 if allow_neg_eigval else 1.0
    if lower_bound is None and gating.serves(a, b, A_log, dt_bias, largest_beta):
        log_g, beta = gating.gates(a, b, A_log, dt_bias, largest_beta)
    else:
        log_g = gating.log_gate(A_log, a, dt_bias, lower_bound)
        beta = mx.sigmoid(b)
        beta = largest_beta * beta if allow_neg_eigval else beta
    return gated_delta(q, k, v, log_g, beta, initial_state=state, mask=mask, segments=documents)


def _upstream_forward(
    upstream: Update, arrays: tuple[mx.array, ...], mask: mx.array | None, options: dict[str, Any]
) -> tuple[mx.array, mx.array]:
    def forward(*primals: mx.array) -> tuple[mx.array, mx.array]:
        return upstream(*primals, None, mask, use_kernel=True, **options)

    def ours(*primals: mx.array) -> tuple[mx.array, mx.array]:
        return _ours(primals, state=None, mask=mask, documents=None, **options)

    # Each array is an argument of its own, because custom functions match cotangents to arguments by position.
    call: Any = mx.custom_function(forward)

    @call.vjp
    def backward(primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], _: Any) -> tuple[mx.array, ...]:
        _, gradients = mx.vjp(ours, list(primals), list(cotangents))
        return tuple(gradients)

    return call(*arrays)


def gated_delta_loop(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    *,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    segments: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Run mlx-lm's own loop over tokens (gated_delta_ops), which no patch changes, in place of `gated_delta`."""
    if segments is not None:
        raise ValueError("gated_delta_loop: mlx-lm's loop does not support segments; leave them out.")
    from mlx_lm.models.gated_delta import gated_delta_ops

    return gated_delta_ops(q, k, v, mx.exp(log_g), beta, initial_state, mask)
