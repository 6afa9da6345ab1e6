"""MLX's own attention, which on most devices keeps the matrix of all scores for its backward pass."""

from __future__ import annotations

import io
from functools import lru_cache

import mlx.core as mx

from ..tracing import trace
from .naive import visible_keys

# The primitive of a backward pass that holds no matrix of scores; MLX 0.32.4 has one on Metal, and one on NVIDIA GPUs.
_LINEAR = "ScaledDotProductAttentionVJP"


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


@lru_cache(maxsize=256)
def is_linear(
    queries: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], dtype: mx.Dtype, causal: bool
) -> bool:
    """Tell whether MLX's backward pass for arrays of these shapes [B, H, T, D] holds no matrix of scores.

    MLX's choice depends on its version, the device and the shapes, so this looks into a graph, which is not run.
    """
    q, k, v = (mx.zeros(shape, dtype) for shape in (queries, keys, values))
    dy = mx.zeros((*queries[:3], values[3]), dtype)

    def call(*inputs: mx.array) -> list[mx.array]:
        return [attention_native(*inputs, scale=1.0, causal=causal)]

    with trace.having(to_upstream=True):
        outputs, gradients = mx.vjp(call, [q, k, v], [dy])
    text = io.StringIO()
    mx.export_to_dot(text, *outputs, *gradients)
    return f'"{_LINEAR}"' in text.getvalue()
