"""What a patched gated_delta_update does: gates in log space, routing, and a count of who served the calls."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import mlx.core as mx

from ..machine import backend
from ..ops import segments
from ..ops.gated_delta import gated_delta
from ..ops.pointwise import gating

OURS = "deltatune"
BACKWARD = "upstream forward, deltatune backward"
UPSTREAM = "upstream"

# Tokens from which on a call on a CPU is a prompt or a batch to evaluate; a speculative decoder checks fewer at once.
PROMPT = 16

Update = Callable[..., tuple[mx.array, mx.array]]

_ARRAYS = ("q", "k", "v", "a", "b", "A_log", "dt_bias")
# What some versions of upstream's function have besides: of the gates, and of decoding with a cache.
_OPTIONS, _DECODING = ("lower_bound", "allow_neg_eigval"), ("state_steps", "cache")

_inside_upstream: ContextVar[bool] = ContextVar("inside a call that stays upstream's", default=False)
_served: Counter[str] = Counter()
_callers: list[list[int]] | None = None


def served() -> Counter[str]:
    """Traced calls of the patched function since the last reset(), by who serves them."""
    return Counter(_served)


def reset() -> None:
    """Start counting from nothing."""
    _served.clear()


@contextmanager
def trace() -> Iterator[list[list[int]]]:
    """Collects, for every call that reaches a patched function, the ids of the `self` of each frame above it."""
    global _callers
    outer, counts = _callers, Counter(_served)
    found: list[list[int]] = []
    _callers = found
    try:
        yield found
    finally:
        _callers = outer
        _served.clear()
        _served.update(counts)


def update(upstream: Update) -> Update:
    """The replacement of a `gated_delta_update`, whichever of the options of its versions it has.

    A call that decodes or verifies with a cache of its own stays upstream's; so do the calls that upstream's function
    then makes of itself, by the name that ours has taken.
    """
    signature = inspect.signature(upstream)

    @functools.wraps(upstream)
    def gated_delta_update(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords)
        given.apply_defaults()
        named = given.arguments
        if _inside_upstream.get() or any(named.get(name) is not None for name in _DECODING):
            token = _inside_upstream.set(True)
            try:
                return count(UPSTREAM, upstream(*given.args, **given.kwargs))
            finally:
                _inside_upstream.reset(token)
        arrays = tuple(named[name] for name in _ARRAYS)
        options = {name: named[name] for name in _OPTIONS if name in named}
        return route(upstream, arrays, named["state"], named["mask"], named["use_kernel"], options)

    return gated_delta_update


def route(
    upstream: Update,
    arrays: tuple[mx.array, ...],
    state: mx.array | None,
    mask: mx.array | None,
    use_kernel: bool,
    options: dict[str, Any],
) -> tuple[mx.array, mx.array]:
    """One call of gated_delta_update with arrays (q, k, v, a, b, A_log, dt_bias), served by ours or by upstream.

    Training (`use_kernel` False) is ours. Otherwise the forward pass is upstream's, with our backward behind it.
    A call that carries a state goes to upstream untouched when it decodes: one token, or `use_kernel`. On a CPU, where
    upstream has no kernel but a loop over tokens, a prompt is ours as well.
    """
    use_kernel = use_kernel and not (backend.device() == "cpu" and arrays[0].shape[1] >= PROMPT)
    documents = segments.current()
    if documents is not None:
        if state is not None:
            raise ValueError("gated_delta_update: packed documents start without a state; pass no cache with segments.")
        return count(OURS, _ours(*arrays, state=None, mask=mask, documents=documents, **options))
    if state is not None and (use_kernel or arrays[0].shape[1] == 1):
        return count(UPSTREAM, upstream(*arrays, state, mask, use_kernel=use_kernel, **options))
    if use_kernel:
        return count(BACKWARD, _upstream_forward(upstream, arrays, mask, options))
    return count(OURS, _ours(*arrays, state=state, mask=mask, documents=None, **options))


def count(who: str, result: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
    """`result`, noted as served by `who`."""
    _served[who] += 1
    if _callers is not None:
        _callers.append(_selves())
    return result


def _selves() -> list[int]:
    found: list[int] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if "self" in frame.f_code.co_varnames:
            found.append(id(frame.f_locals.get("self")))
        frame = frame.f_back
    return found


def _ours(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    *,
    state: mx.array | None,
    mask: mx.array | None,
    documents: mx.array | None,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    most = 2.0 if allow_neg_eigval else 1.0
    if backend.device() == "cuda" and lower_bound is None and gating.serves(a, b, A_log, dt_bias, most):
        log_g, beta = gating.gates(a, b, A_log, dt_bias, most)
    else:
        log_g, beta = gating.log_gate(A_log, a, dt_bias, lower_bound), mx.sigmoid(b)
        beta = most * beta if allow_neg_eigval else beta
    return gated_delta(q, k, v, log_g, beta, initial_state=state, mask=mask, segments=documents)


def _upstream_forward(
    upstream: Update, arrays: tuple[mx.array, ...], mask: mx.array | None, options: dict[str, Any]
) -> tuple[mx.array, mx.array]:
    def forward(*primals: mx.array) -> tuple[mx.array, mx.array]:
        return upstream(*primals, None, mask, use_kernel=True, **options)

    def ours(*primals: mx.array) -> tuple[mx.array, mx.array]:
        return _ours(*primals, state=None, mask=mask, documents=None, **options)

    # One argument a primal: custom functions count cotangents by position and check none of them.
    call: Any = mx.custom_function(forward)

    @call.vjp
    def backward(primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], _: Any) -> tuple[mx.array, ...]:
        _, gradients = mx.vjp(ours, list(primals), list(cotangents))
        return tuple(gradients)

    return call(*arrays)
