"""Replaces `mx.fast.scaled_dot_product_attention`, through which every model of mlx-lm and mlx-vlm attends.

Who serves a call is decided when the call is traced. deltatune does where rows are trained or scored whole: while a
gradient is taken, within whole_rows(), and where documents are packed. Every other call, such as those of a decoder,
goes to the original function, whatever mode the model is in. Calls are noted with their layers where somebody asks.

MLX's function knows no cache and no module, so neither `cache is None` nor `model.training` could decide. Both would
also be wrong: a trainer may sample from a model in training mode, and a loss may differentiate through a cache.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import mlx.core as mx

from ..ops.attention import attention
from ..ops.attention.choice import OPERATOR
from ..ops.attention.trial_case import AttentionCall
from ..ops.decoding import attention_token
from ..ops.decoding.row_caches import lengths_of
from ..ops.functional import is_floating
from ..ops.operator import candidates
from ..ops.segments import MaskRule, remember, rule_of
from ..ops.tracing import dispatch, trace
from ..ops.tracing.dispatch import NotedCall

# The tokens of the row for which a noted call asks for its implementation.
_ROW = 512


@contextmanager
def noting_calls() -> Iterator[list[NotedCall]]:
    """Note every call of a patched function within a `with` block in a list. Calls inside it do not count outside."""
    calls: list[NotedCall] = []
    with dispatch.having(callers=calls, recurrences=Counter(), attentions=Counter()):
        yield calls


def asked_for_names() -> bool:
    """Whether calls are noted, so that the name of an implementation may be asked for."""
    told = dispatch.current()
    return told.callers is not None and told.trials


def note_call(operator: str, implementation: Callable[[], str] | None) -> None:
    """Note a call of an operator, "gated delta", "linear attention", "attention" or "experts", where calls are noted.

    `implementation` names the one that serves the call in training, as for of_a_row(); None where upstream's code does.
    """
    calls = dispatch.current().callers
    if calls is not None:
        name = implementation() if implementation is not None and asked_for_names() else ""
        calls.append(NotedCall(operator, _selves(), name))


def of_a_row(arrays: Sequence[mx.array], axis: int = 1) -> list[mx.array]:
    """Return arrays of a row's tokens along `axis`, all of them the first one of each of `arrays`."""
    first = mx.zeros(_ROW, mx.int32)
    return [mx.take(array, first, axis) for array in arrays]


def _selves() -> list[int]:
    """The ids of the `self` of every stack frame above this one."""
    identities: list[int] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if "self" in frame.f_code.co_varnames:
            identities.append(id(frame.f_locals.get("self")))
        frame = frame.f_back
    return identities


Function = Callable[..., Any]

# Who may serve a call; the keys of the counter that served() returns.
OURS = "deltatune"
UPSTREAM = "upstream"

# A call of at least this many tokens a row is a prompt or an evaluation. A speculative decoder checks fewer.
PROMPT_TOKENS = 16


def whole_rows() -> AbstractContextManager[None]:
    """Within the context, deltatune serves attention, as it does while a gradient is taken.

    Evaluations use it, because they have to fit into memory where training does.
    """
    return trace.having(whole_rows=True)


def serves_attention() -> bool:
    """Whether deltatune serves the attention that is called now."""
    told = trace.current()
    return (told.whole_rows or told.segments is not None) and not told.to_upstream


def decodes(tokens: int) -> bool:
    """Whether a call on so many tokens of each row is a decoder's, which leaves a patched function at once.

    It is short, no gradient is taken of it, no documents are packed in it, and it is no step of a batch.
    """
    if tokens >= PROMPT_TOKENS:
        return False
    told = trace.current()
    return not told.whole_rows and told.segments is None and not told.next_tokens


def served() -> Counter[str]:
    """How many calls OURS and UPSTREAM served since the last reset(). A compiled function counts once per trace."""
    return Counter(dispatch.current().attentions)


def reset() -> None:
    """Set the counts of served() back to zero, and those of the recurrence."""
    dispatch.current().attentions.clear()
    dispatch.current().recurrences.clear()


def whole(upstream: Function) -> Function:
    """Build the replacement of a function that evaluates a model on whole rows, or takes gradients itself."""

    @wraps(upstream)
    def marked(*arguments: Any, **keywords: Any) -> Any:
        with whole_rows():
            return upstream(*arguments, **keywords)

    return marked


def marking(upstream: Function) -> Function:
    """Build the replacement of a transform that returns a function, mx.grad or mx.value_and_grad.

    Calls of the function are marked and not only of the function that it differentiates: the backward pass of a
    checkpoint runs a layer again when that function has returned.
    """

    @wraps(upstream)
    def transform(*arguments: Any, **options: Any) -> Function:
        return whole(upstream(*arguments, **options))

    return transform


def attending(upstream: Function) -> Function:
    """Build the replacement of mx.fast.scaled_dot_product_attention."""

    @wraps(upstream)
    def scaled_dot_product_attention(
        q: Any, k: Any, v: Any, *, scale: float, mask: Any = None, sinks: Any = None, **options: Any
    ) -> mx.array:
        arrays = None if options or not serves_attention() else _arrays(q, k, v, mask, sinks)
        if arrays is None:
            y = None if mask is None else _of_a_token(q, k, v, scale, mask, sinks)
            if y is not None:
                return y
            # A call of deltatune's attention that MLX's function serves is counted by whoever made it.
            if not trace.current().to_upstream:
                dispatch.current().attentions[UPSTREAM] += 1
                note_call("attention", None)
            return upstream(q, k, v, scale=scale, mask=mask, sinks=sinks, **options)
        dispatch.current().attentions[OURS] += 1
        note_call("attention", lambda: _implementation(arrays, scale, mask, sinks))
        # MLX's function itself is called where DELTATUNE_ATTENTION=native forces it.
        with trace.having(to_upstream=True):
            return _attend(upstream, arrays, scale, mask, sinks)

    return scaled_dot_product_attention


def _of_a_token(q: Any, k: Any, v: Any, scale: float, mask: Any, sinks: Any) -> mx.array | None:
    """The attention of a batch's next tokens, in rows of different lengths; None for any other call."""
    lengths = lengths_of(mask) if sinks is None else None
    if lengths is None or not attention_token.serves(q, k, v, lengths):
        return None
    return attention_token.attention_token(q, k, v, lengths, scale)


def _implementation(arrays: list[mx.array], scale: float, mask: Any, sinks: Any) -> str:
    """Name the implementation of such a call in training; a mask is taken for causal."""
    q, k, v = of_a_row(arrays, axis=2)
    return candidates.choose(OPERATOR, AttentionCall(q, k, v, mask is not None, None, None, sinks, None, scale))[0]


def _arrays(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> list[mx.array] | None:
    """q, k and v in one dtype, as MLX promotes them; None for a call that only MLX's function takes or refuses."""
    heads = [q, k, v]
    if not all(isinstance(x, mx.array) and is_floating(x) for x in heads + ([] if sinks is None else [sinks])):
        return None
    if not all(x.ndim == 4 and x.size for x in heads) or not _is_usual(mask, q.shape[:3], k.shape[2]):
        return None
    dtype = mx.result_type(*[x.dtype for x in heads])
    return [x.astype(dtype) for x in heads]


def _is_usual(mask: Any, queries: tuple[int, ...], keys: int) -> bool:
    """Whether deltatune's attention takes the mask.

    Floats for every single head, such as the positional scores of some models, stay MLX's: the mask and its gradient
    alone are as large as the memory that deltatune's attention would save.
    """
    if mask is None or isinstance(mask, str):
        return mask in (None, "causal")
    if not isinstance(mask, mx.array) or mask.ndim > 4:
        return False
    whole = (*queries, keys)
    fits = all(n in (1, full) for n, full in zip(mask.shape[::-1], whole[::-1], strict=False))
    per_head = mask.ndim > 2 and mask.shape[-3] > 1
    return fits and (mask.dtype == mx.bool_ or (is_floating(mask) and not per_head))


def _attend(upstream: Function, arrays: list[mx.array], scale: float, mask: Any, sinks: Any) -> mx.array:
    if mask is None or isinstance(mask, str):
        documents = None if mask is None else _documents(arrays[0])
        return attention(*arrays, scale=scale, causal=mask is not None, segments=documents, sinks=sinks)
    rule = rule_of(mask)
    if rule is not None and arrays[0].shape[2] == arrays[1].shape[2]:
        # The second run of a checkpoint has segments of its own, which make it wait for its cotangents.
        documents = _documents(arrays[0])
        documents = rule.segments if documents is None else documents
        return attention(*arrays, scale=scale, segments=documents, window=rule.window, sinks=sinks)
    y = attention(*arrays, scale=scale, causal=False, mask=mx.stop_gradient(mask), sinks=sinks)
    return y if mask.dtype == mx.bool_ else _with_gradient_of(mask, y, upstream, [*arrays, sinks], scale)


def _documents(q: mx.array) -> mx.array | None:
    """Return the documents of packed rows or of a piece of them, which a causal mask must keep apart; else None.

    Models of mlx-vlm, and a piece of a row, are given a causal mask that knows no documents.
    """
    told = trace.current()
    documents = told.segments
    whole = documents is not None and tuple(documents.shape) == (q.shape[0], q.shape[2])
    return documents if whole or told.piece is not None else None


def _with_gradient_of(
    mask: mx.array, y: mx.array, upstream: Function, arrays: list[mx.array | None], scale: float
) -> mx.array:
    """y, through which the gradient of a mask of floats reaches the mask.

    MLX's function gives that gradient. It is only computed where the mask depends on trained parameters, since MLX
    computes no unread gradient.
    """
    fixed = [mx.stop_gradient(x) for x in arrays if x is not None]

    def identity(y: mx.array, _mask: mx.array, *_fixed: mx.array) -> list[mx.array]:
        return [y]

    function: Any = mx.custom_function(identity)

    @function.vjp
    def backward(primals: Any, cotangents: Any, _: Any) -> list[mx.array]:
        _, mask, q, k, v, *sinks = primals

        def of_mask(mask: mx.array) -> list[mx.array]:
            return [upstream(q, k, v, scale=scale, mask=mask, sinks=sinks[0] if sinks else None)]

        _, (gradient,) = mx.vjp(of_mask, [mask], [cotangents[0]])
        return [cotangents[0], gradient, *(mx.zeros_like(x) for x in primals[2:])]

    return function(y, mask, *fixed)[0]


def remembering(upstream: Function) -> Function:
    """Build the replacement of a create_causal_mask, so that deltatune's attention does not read its masks."""

    @wraps(upstream)
    def create_causal_mask(
        N: int, offset: int = 0, window_size: int | None = None, right_padding: Any = None, left_padding: Any = None
    ) -> mx.array:
        mask = upstream(N, offset, window_size, right_padding, left_padding)
        if offset or right_padding is not None or left_padding is not None or not serves_attention():
            return mask
        return remember(mask, MaskRule(window_size, None))

    return create_causal_mask
