"""attention(): the checked entry point; choice.py finds the implementation behind it."""

from __future__ import annotations

import mlx.core as mx

from .choice import AttentionCall, choose

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
    """Softmax attention, differentiable in q, k, v and sinks, that never holds a matrix of all scores.

    For each query: the sum of the values of the keys that it sees, weighted with the softmax of scale * q . k.

    Arguments:
        q: [B, HQ, TQ, D], fp32, fp16 or bf16.
        k: [B, HK, TK, D], HQ a multiple of HK; query head h reads key head h // (HQ / HK).
        v: [B, HK, TK, DV]; DV may differ from D.
        scale: what scores are multiplied by, usually D ** -0.5.
        causal: a query sees no key behind it; the last query stands at the last key.
        segments: [B, TK] integers, non-decreasing along TK, where TQ is at most TK; a query sees its own segment alone,
            which is that of the key at which it stands.
        window: how many keys a query sees at most, itself and those before it; with `causal` alone.
        sinks: [HQ], scores of a key that every query sees and whose value is 0.
        mask: what hides more, of a shape that broadcasts to [B, HQ, TQ, TK]: bool (True: may be seen), or floats that
            are added to the scores, of which -1e30 or less hides. It gets no gradient.

    Returns y [B, HQ, TQ, DV] in q's dtype. A query that sees nothing gives 0, and its gradients are 0.

    Raises ValueError, naming the argument, for a wrong shape, dtype or combination; NotImplementedError when a second
    derivative is taken. The values of segments are not checked. mx.vmap is refused with a ValueError, except where
    DELTATUNE_ATTENTION=naive or MLX's own attention serves: fold the mapped axis into B.

    Source: arXiv 1706.03762; by blocks: arXiv 2112.05682, 2205.14135, 2307.08691; README.md beside this file.
    """
    _check(q, k, v, causal, segments, window, sinks, mask)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    _, function = choose(AttentionCall(q, k, v, causal, segments, window, sinks, mask, float(scale)))
    return function(
        q, k, v, scale=float(scale), causal=causal, segments=segments, window=window, sinks=sinks, mask=mask
    )


def _check(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    causal: bool,
    segments: mx.array | None,
    window: int | None,
    sinks: mx.array | None,
    mask: mx.array | None,
) -> None:
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
    if window is not None and (window < 1 or not causal):
        got = "causal=False" if window >= 1 else str(window)
        raise ValueError(f"attention: window must be 1 or more, and comes with causal=True alone, got {got}")
    if segments is not None:
        if queries > keys:
            raise ValueError(f"attention: segments want no more queries than keys, got {queries} and {keys}")
        _check_shape("segments", segments, (batch, keys))
        if not mx.issubdtype(segments.dtype, mx.integer):
            raise ValueError(f"attention: segments must be integers, got {segments.dtype}")
    if sinks is not None:
        _check_shape("sinks", sinks, (heads,))
        _check_float("sinks", sinks)
    if mask is not None:
        _check_mask(mask, (batch, heads, queries, keys))


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
