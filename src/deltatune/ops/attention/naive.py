"""Attention by its definition, with whole matrices of scores: the reference for every other implementation."""

from __future__ import annotations

import mlx.core as mx


def attention_naive(
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
    """Compute the softmax of all scores in fp32, with gradients by autodiff. Arguments and result are `attention`'s.

    Source: arXiv 1706.03762, section 3.2.1. The sinks are those of gpt-oss.
    """
    batch, heads, queries, _ = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    q32 = q.astype(mx.float32).reshape(batch, key_heads, heads // key_heads, queries, -1)
    k32, v32 = (x.astype(mx.float32)[:, :, None] for x in (k, v))
    scores = (q32 * scale) @ k32.swapaxes(-1, -2)
    visible = visible_keys(queries, keys, causal, segments, window)
    if mask is not None:
        mask = mx.stop_gradient(mx.broadcast_to(mask, (batch, heads, queries, keys)).reshape(scores.shape))
        visible = visible & (mask if mask.dtype == mx.bool_ else mask > -mx.inf)
        if mask.dtype != mx.bool_:
            scores = scores + mx.where(visible, mask, 0.0)
    visible = mx.broadcast_to(visible, scores.shape)
    # A row that sees no key has no largest score. Any number serves in its place, because all weights are then 0.
    largest = mx.where(visible, scores, -mx.inf).max(axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(mx.float32).reshape(key_heads, -1, 1, 1)
    if sink is not None:
        largest = mx.maximum(largest, sink)
    largest = mx.stop_gradient(mx.where(largest == -mx.inf, 0.0, largest))
    weights = mx.where(visible, mx.exp(mx.where(visible, scores, largest) - largest), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + mx.exp(sink - largest)
    y = (weights / mx.where(total == 0, 1.0, total)) @ v32
    return y.reshape(batch, heads, queries, -1).astype(q.dtype)


def visible_keys(queries: int, keys: int, causal: bool, segments: mx.array | None, window: int | None) -> mx.array:
    """Return which keys each query sees when there is no mask, as booleans [1 or B, 1, 1, Tq, Tk].

    The last query has the position of the last key. A causal query sees the keys up to its own position.
    """
    # The position of each query among the keys.
    position = mx.arange(queries)[:, None] + (keys - queries)
    other = mx.arange(keys)[None]
    visible = mx.ones((queries, keys), mx.bool_)
    if causal:
        visible = other <= position
    if window is not None:
        visible = visible & (other > position - window)
    visible = visible[None, None, None]
    if segments is not None:
        of_queries = segments[:, keys - queries :]
        visible = visible & (of_queries[:, None, None, :, None] == segments[:, None, None, None, :])
    return visible
