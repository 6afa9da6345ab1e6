"""The short depthwise convolution in front of a gated-delta layer, with an incoming state and packed documents.

It is computed as a sum of K shifted products, which MLX compiles into one elementwise pass. On a CPU this is far faster
than MLX's grouped convolution, and the same pass can leave out inputs of another document.
"""

from __future__ import annotations

import mlx.core as mx

from ..machine import backend
from .functional import with_gradient

# How many products one fp32 sum adds up, before the sums of the blocks are added.
BLOCK = 64


def causal_conv(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    *,
    initial_state: mx.array | None = None,
    segments: mx.array | None = None,
) -> mx.array:
    """Return y[t, c] = bias[c] + sum over j of weight[c, j] x[t - (K - 1) + j, c], [B, T, C] in x's dtype.

    x is [B, T, C], T >= 1, fp32, fp16 or bf16, the weight [C, K] and the bias [C]; the last column of the weight
    multiplies the present token. initial_state [B, K - 1, C] has the inputs just before x, oldest first, which count as
    part of the first segment; None means zeros. Within segments [B, T], integers that never decrease along T, an output
    depends on inputs of its own segment only. Sums are in fp32. Source: `GatedDeltaNet` in mlx_lm/models/qwen3_5.py,
    `ShortConv1d` in kimi_linear.py.
    """
    B, _, C = x.shape
    history = weight.shape[1] - 1
    if initial_state is None:
        initial_state = mx.zeros((B, history, C), x.dtype)
    padded = mx.concatenate([initial_state.astype(x.dtype), x], axis=1)
    segment = None
    if segments is not None:
        first = mx.broadcast_to(segments[:, :1], (B, history))
        segment = mx.stop_gradient(mx.concatenate([first, segments], axis=1)[..., None])
    y = with_gradient(_forward, _backward)(padded, weight, segment)
    return y if bias is None else y + bias.astype(y.dtype)


def is_faster() -> bool:
    """Whether `causal_conv` is faster than MLX's grouped convolution, forward and backward: on a CPU."""
    return backend.device() == "cpu"


def joined_conv(x: mx.array, weight: mx.array, segments: mx.array | None = None) -> mx.array:
    """Convolve rows that follow the state, in the fastest way on MLX's device; return [B, T, C] in x's dtype.

    x [B, K - 1 + T, C] has the state of K - 1 inputs, oldest first, then the tokens; the weight is [C, K], and segments
    are as for `causal_conv`.
    """
    if segments is None and backend.device() == "metal":
        return mx.conv1d(x, weight[..., None], groups=weight.shape[0])
    history = weight.shape[1] - 1
    return causal_conv(x[:, history:], weight, initial_state=x[:, :history], segments=segments)


def _backward(primals, cotangent, _output):
    padded, weight, segment = primals
    d_padded = _d_padded(cotangent, weight, segment)
    d_columns: list[mx.array] = []
    for column in range(weight.shape[1]):
        # Each column waits for the one before, so that only one [B, T, C] product is in memory at a time.
        previous = d_columns[-1] if d_columns else d_padded
        waiting = mx.depends([cotangent], [previous])[0]
        d_columns.append(_d_column(waiting, padded, column, segment, weight.shape[1]))
    d_weight = mx.stack(d_columns, axis=1).astype(weight.dtype)
    if segment is None:
        return d_padded, d_weight
    return d_padded, d_weight, mx.zeros_like(segment)


@mx.compile
def _forward(padded, weight, segment):
    """Convolve padded [B, T+K-1, C] with weight [C, K] to [B, T, C], within segment [B, T+K-1, 1] if it is given."""
    K = weight.shape[1]
    T = padded.shape[1] - (K - 1)
    products = []
    for column in range(K):
        value = padded[:, column : column + T].astype(mx.float32)
        if segment is not None and column < K - 1:
            value = mx.where(segment[:, column : column + T] == segment[:, K - 1 :], value, mx.zeros(()))
        products.append(value * weight[:, column].astype(mx.float32))
    return sum(products[1:], products[0]).astype(padded.dtype)


@mx.compile
def _d_padded(cotangent, weight, segment):
    """The gradient of the padded input: row s entered the outputs s - column for every column of the weight."""
    K = weight.shape[1]
    rows = cotangent.shape[1] + K - 1
    d_output = mx.pad(cotangent, [(0, 0), (K - 1, K - 1), (0, 0)])
    output_segment = None if segment is None else mx.pad(segment, [(0, 0), (0, K - 1), (0, 0)])
    products = []
    for column in range(K):
        shift = K - 1 - column
        value = d_output[:, shift : shift + rows].astype(mx.float32)
        if output_segment is not None and shift > 0:
            value = mx.where(output_segment[:, shift : shift + rows] == segment, value, mx.zeros(()))
        products.append(value * weight[:, column].astype(mx.float32))
    return sum(products[1:], products[0]).astype(cotangent.dtype)


def _d_column(cotangent, padded, column, segment, K):
    """The gradient [C] of one column of the weight."""
    T = cotangent.shape[1]
    product = cotangent.astype(mx.float32) * padded[:, column : column + T].astype(mx.float32)
    if segment is not None and column < K - 1:
        product = mx.where(segment[:, column : column + T] == segment[:, K - 1 :], product, mx.zeros(()))
    return _sum_over_tokens(product)


def _sum_over_tokens(product: mx.array) -> mx.array:
    """Sum [B, T, C] over B and T in blocks, since a single running sum loses digits as T grows."""
    B, T, C = product.shape
    in_blocks = T - T % BLOCK
    if in_blocks == 0:
        return product.sum(axis=(0, 1))
    total = product[:, :in_blocks].reshape(B, -1, BLOCK, C).sum(axis=2).sum(axis=(0, 1))
    return total + product[:, in_blocks:].sum(axis=(0, 1)) if in_blocks < T else total
