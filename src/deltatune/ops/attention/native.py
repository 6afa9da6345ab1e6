"""MLX's own attention, which on most devices keeps the matrix of all scores for its backward pass."""

from __future__ import annotations

import mlx.core as mx

from .naive import visible_keys


def attention_native(
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
    """Call `mx.fast.scaled_dot_product_attention`.

    Arguments and result are those of `attention`, except that a query that sees no key does not give 0.
    """
    sinks = None if sinks is None else sinks.astype(q.dtype)
    whole: mx.array | str | None = mask
    if segments is not None or window is not None or (causal and mask is not None):
        visible = visible_keys(q.shape[2], k.shape[2], causal, segments, window)[:, 0]
        if mask is None:
            whole = visible
        else:
            whole = visible & mask if mask.dtype == mx.bool_ else mx.where(visible, mask, -mx.inf).astype(q.dtype)
    elif causal:
        whole = "causal"
    elif mask is not None and mask.dtype != mx.bool_:
        whole = mask.astype(q.dtype)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=whole, sinks=sinks)
