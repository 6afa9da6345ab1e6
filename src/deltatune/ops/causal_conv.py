"""The short causal convolution in front of a gated-delta layer: one filter a channel, with state and document resets.

A sum of K shifted products: as one fused elementwise pass it is far faster on a CPU than MLX's grouped convolution
(docs/log.md), and a tap that would reach into another document is a condition in the same pass.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

BLOCK = 64


def causal_conv(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    *,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    segments: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Depthwise causal convolution: y[t, c] = bias[c] + sum_j weight[c, j] x[t - (K - 1) + j, c].

    Args:
        x: [B, T, C], T >= 1, fp32, fp16 or bf16.
        weight: [C, K]; `conv1d.weight` of an mlx-lm layer is [C, K, 1], so pass `weight[..., 0]`. The last tap reads
            the present token.
        bias: [C].
        initial_state: [B, K - 1, C], the inputs just before x, oldest first; they count as the first segment's.
            None stands for zeros.
        mask: [B, T] bool; a token that is False enters as zeros. Its own output is still computed.
        segments: [B, T] integers, non-decreasing along T; no tap reaches across a change.

    Returns:
        y [B, T, C] in x's dtype (sums in fp32), and the state [B, K - 1, C] to continue with: the last K - 1 inputs,
        masked, with zeros for those of an earlier segment than the last token's.

    Raises:
        ValueError: a shape that does not fit.

    Source: `GatedDeltaNet.__call__` in mlx_lm/models/qwen3_5.py, `ShortConv1d` in kimi_linear.py.
    """
    _check(x, weight, bias, initial_state, mask, segments)
    B, T, C = x.shape
    reach = weight.shape[1] - 1
    if mask is not None:
        x = mx.where(mask[..., None], x, mx.zeros((), x.dtype))
    if initial_state is None:
        initial_state = mx.zeros((B, reach, C), x.dtype)
    padded = mx.concatenate([initial_state.astype(x.dtype), x], axis=1)
    state = padded[:, T:]
    if segments is None:
        y = _taps(padded, weight)
    else:
        first = mx.broadcast_to(segments[:, :1], (B, reach))
        owner = mx.stop_gradient(mx.concatenate([first, segments], axis=1)[..., None])
        y = _taps(padded, weight, owner)
        state = mx.where(owner[:, T:] == owner[:, -1:], state, mx.zeros((), x.dtype))
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y, state


def _taps(padded: mx.array, weight: mx.array, owner: mx.array | None = None) -> mx.array:
    """padded [B, T+K-1, C] with weight [C, K] -> [B, T, C]; a tap counts where owner [B, T+K-1, 1] agrees."""
    taps: Any = mx.custom_function(_forward)
    taps.vjp(_backward)
    return taps(padded, weight, owner)


def _backward(primals, cotangent, _output):
    padded, weight, owner = primals
    d_padded = _d_padded(cotangent, weight, owner)
    taps: list[mx.array] = []
    for tap in range(weight.shape[1]):
        # One [B, T, C] product at a time: each waits for the sum of the one before.
        after = taps[-1] if taps else d_padded
        taps.append(_d_tap(mx.depends([cotangent], [after])[0], padded, tap, owner, weight.shape[1]))
    d_weight = mx.stack(taps, axis=1).astype(weight.dtype)
    if owner is None:
        return d_padded, d_weight
    return d_padded, d_weight, mx.zeros_like(owner)


@mx.compile
def _forward(padded, weight, owner):
    K = weight.shape[1]
    T = padded.shape[1] - (K - 1)
    products = []
    for tap in range(K):
        value = padded[:, tap : tap + T].astype(mx.float32)
        if owner is not None and tap < K - 1:
            value = mx.where(owner[:, tap : tap + T] == owner[:, K - 1 :], value, mx.zeros(()))
        products.append(value * weight[:, tap].astype(mx.float32))
    return sum(products[1:], products[0]).astype(padded.dtype)


@mx.compile
def _d_padded(cotangent, weight, owner):
    """Row s of the padded input was read by outputs s - tap, for every tap."""
    K = weight.shape[1]
    rows = cotangent.shape[1] + K - 1
    spread = mx.pad(cotangent, [(0, 0), (K - 1, K - 1), (0, 0)])
    reader = None if owner is None else mx.pad(owner, [(0, 0), (0, K - 1), (0, 0)])
    products = []
    for tap in range(K):
        back = K - 1 - tap
        value = spread[:, back : back + rows].astype(mx.float32)
        if reader is not None and back > 0:
            value = mx.where(reader[:, back : back + rows] == owner, value, mx.zeros(()))
        products.append(value * weight[:, tap].astype(mx.float32))
    return sum(products[1:], products[0]).astype(cotangent.dtype)


def _d_tap(cotangent, padded, tap, owner, K):
    T = cotangent.shape[1]
    product = cotangent.astype(mx.float32) * padded[:, tap : tap + T].astype(mx.float32)
    if owner is not None and tap < K - 1:
        product = mx.where(owner[:, tap : tap + T] == owner[:, K - 1 :], product, mx.zeros(()))
    return _total(product)


def _total(product: mx.array) -> mx.array:
    """Sum of [B, T, C] over B and T, by blocks: one running sum a channel loses digits as T grows."""
    B, T, C = product.shape
    whole = T - T % BLOCK
    if whole == 0:
        return product.sum(axis=(0, 1))
    blocks = product[:, :whole].reshape(B, -1, BLOCK, C).sum(axis=2).sum(axis=(0, 1))
    return blocks + product[:, whole:].sum(axis=(0, 1)) if whole < T else blocks


def _check(x, weight, bias, initial_state, mask, segments) -> None:
    if x.ndim != 3 or x.shape[1] < 1:
        raise ValueError(f"causal_conv: x must be [B, T, C] with T >= 1, got {list(x.shape)}.")
    B, T, C = x.shape
    if weight.ndim != 2 or weight.shape[0] != C or weight.shape[1] < 1:
        raise ValueError(f"causal_conv: weight must be [C, K] = [{C}, K], got {list(weight.shape)}.")
    reach = weight.shape[1] - 1
    for name, array, shape in (
        ("bias", bias, (C,)),
        ("initial_state", initial_state, (B, reach, C)),
        ("mask", mask, (B, T)),
        ("segments", segments, (B, T)),
    ):
        if array is not None and tuple(array.shape) != shape:
            raise ValueError(f"causal_conv: {name} must be {list(shape)}, got {list(array.shape)}.")
