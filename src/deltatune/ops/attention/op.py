"""The public operator `attention`.

It checks its arguments and hands them to the implementation that choice.py selects for the call.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from ..operator import candidates
from .choice import OPERATOR
from .trial_case import AttentionCall

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    causal: bool = True,
    segments: mx.array | None = None,
    window: int | None = None,
    sinks: mx.array | None = None,
    mask: mx.array | None = None,
) -> mx.array:
    """Compute softmax attention, differentiable in q, k, v and sinks, without a matrix of all scores.

    The result for a query is the sum of the values of the keys that it sees, weighted by the softmax of scale * q . k.

    Args:
        q: Queries [B, Hq, Tq, D] in fp32, fp16 or bf16.
        k: Keys [B, Hk, Tk, D]. Hq is a multiple of Hk, and query head h reads key head h // (Hq / Hk).
        v: Values [B, Hk, Tk, Dv]. Dv may differ from D.
        scale: The factor of the scores, usually D^-0.5.
        causal: Whether a query sees no later key. The last query has the position of the last key.
        segments: [B, Tk] integers that never decrease along Tk, where Tq is at most Tk. A query sees only the segment
            of the key at its own position.
        window: The number of keys that a query sees at most, its own position included. It needs `causal`.
        sinks: [Hq], the scores of one more key of value 0, which every query sees.
        mask: Further keys to hide, in a shape that broadcasts to [B, Hq, Tq, Tk]: booleans, of which True may be seen,
            or floats that are added to the scores, of which -1e30 or less hides. It gets no gradient.

    Returns:
        y [B, Hq, Tq, Dv] in q's dtype. A query that sees no key gives 0, and its gradients are 0.

    Raises:
        ValueError: An argument has a wrong shape, dtype or combination (the message names it), or mx.vmap maps a call
            that `blocked` or the fused kernels serve. The values of segments are not checked.
        NotImplementedError: A second derivative is taken.
        UserError: DELTATUNE_ATTENTION forces an implementation that cannot serve this call.

    Source:
        arXiv 1706.03762; in blocks arXiv 2112.05682, 2205.14135 and 2307.08691; and README.md in this folder.

    Example:
        >>> q, k, v = (mx.random.normal((1, 2, 8, 16)) for _ in range(3))
        >>> attention(q, k, v, scale=16**-0.5).shape
        (1, 2, 8, 16)
    """
    call = AttentionCall(q, k, v, causal, segments, window, sinks, mask, float(scale))
    _check(call)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    _, function = candidates.choose(OPERATOR, replace(call, mask=mask))
    return function(
        q, k, v, scale=float(scale), causal=causal, segments=segments, window=window, sinks=sinks, mask=mask
    )


def _check(call: AttentionCall) -> None:
    q, k, v, window = call.q, call.k, call.v, call.window
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"attention: {name} must have 4 dimensions [B, H, T, D], got shape {list(array.shape)}")
        _check_float(name, array)
    batch, heads, queries, size = q.shape
    key_heads, keys = k.shape[1:3]
    for name, array in (("q", q), ("k", k), ("v", v)):
        if min(array.shape) < 1:
            raise ValueError(f"attention: {name} must hold at least one element, got shape {list(array.shape)}")
    if heads % key_heads:
        raise ValueError(f"attention: q must have a multiple of k's {key_heads} heads, got {heads}")
    _check_shape("k", k, (batch, key_heads, keys, size))
    _check_shape("v", v, (batch, key_heads, keys, v.shape[3]))
    if window is not None and (window < 1 or not call.causal):
        got = "causal=False" if window >= 1 else str(window)
        raise ValueError(f"attention: window must be 1 or more and needs causal=True, got {got}")
    if call.segments is not None:
        if queries > keys:
            raise ValueError(f"attention: segments need no more queries than keys, got {queries} and {keys}")
        _check_shape("segments", call.segments, (batch, keys))
        if not mx.issubdtype(call.segments.dtype, mx.integer):
            raise ValueError(f"attention: segments must be integers, got {call.segments.dtype}")
    if call.sinks is not None:
        _check_shape("sinks", call.sinks, (heads,))
        _check_float("sinks", call.sinks)
    if call.mask is not None:
        _check_mask(call.mask, (batch, heads, queries, keys))


def _check_mask(mask: mx.array, whole: tuple[int, ...]) -> None:
    if mask.dtype != mx.bool_ and mask.dtype not in _FLOATS:
        raise ValueError(f"attention: mask must be bool, float32, float16 or bfloat16, got {mask.dtype}")
    shape = mask.shape
    fits = len(shape) <= 4 and all(n in (1, full) for n, full in zip(shape[::-1], whole[::-1], strict=False))
    if not fits:
        raise ValueError(f"attention: mask must broadcast to {list(whole)}, got shape {list(shape)}")


def _check_shape(name: str, array: mx.array, expected: tuple[int, ...]) -> None:
    if tuple(array.shape) != expected:
        raise ValueError(f"attention: {name} must have shape {list(expected)}, got {list(array.shape)}")


def _check_float(name: str, array: mx.array) -> None:
    if array.dtype not in _FLOATS:
        raise ValueError(f"attention: {name} must be float32, float16 or bfloat16, got {array.dtype}")
