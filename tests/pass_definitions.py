"""The definitions of passes around the recurrence and attention, in float64, for benchmarks and tests."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from deltatune.ops.pointwise.conv import NormedHeads

_NAMES = {mx.float32: "fp32", mx.bfloat16: "bf16"}
Shapes = list[tuple[int, ...]]
_EPS = 1e-6
_GROUP = 64


def inverse_rms(x: mx.array, eps: float) -> mx.array:
    """1 / sqrt(mean(x^2) + eps) over the last axis."""
    return mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def reference_gates(
    a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, largest_beta: float = 1.0
) -> tuple[mx.array, mx.array]:
    """The definition of `gates`, in float64."""
    return -mx.exp(A_log) * mx.logaddexp(a + dt_bias, mx.zeros((), mx.float64)), largest_beta * mx.sigmoid(b)


def reference_conv(x: mx.array, weight: mx.array, length: int, owner: np.ndarray | None) -> mx.array:
    """The definition of `conv_silu` as a sum over taps, in float64.

    owner: [T], the document of each token; no tap reaches into another document.
    """
    taps = weight.shape[1]
    total = mx.zeros((x.shape[0], length, x.shape[2]), mx.float64)
    for tap in range(taps):
        same_document = np.ones(length)
        if owner is not None:
            before = np.maximum(0, np.arange(length) - (taps - 1 - tap))
            same_document = (owner[before] == owner).astype(np.float64)
        # mx.array turns NumPy's float64 into float32, in which zeros and ones are exact.
        inside = mx.array(same_document).astype(mx.float64)
        total = total + x[:, tap : tap + length] * weight[:, tap] * inside[:, None]
    return total * mx.sigmoid(total)


def reference_heads(
    x: mx.array, weight: mx.array, heads: NormedHeads, state: mx.array | None = None, owner: np.ndarray | None = None
) -> tuple[mx.array, ...]:
    """The definition of `conv_heads`, in float64, with `owner` as for `reference_conv`."""
    batch, length, channels = x.shape
    if state is None:
        state = mx.zeros((batch, weight.shape[1] - 1, channels), mx.float64)
    y = reference_conv(mx.concatenate([state, x], axis=1), weight, length, owner)
    q, k, v = mx.split(y, [heads.channels, 2 * heads.channels], axis=-1)
    q, k = (part.reshape(batch, length, heads.count, heads.size) for part in (q, k))
    q, k = (part * inverse_rms(part, heads.eps) for part in (q, k))
    return heads.query_factor * q, heads.key_factor * k, v


def reference_turned_heads(
    x: mx.array, weight: mx.array, eps: float, rotary_dims: int, base: float, gated: bool
) -> tuple[mx.array, ...]:
    """The definition of `turned_heads`, in float64."""
    width, half = weight.shape[0], rotary_dims // 2
    angles = np.outer(np.arange(x.shape[1]), base ** (-np.arange(half) / half))
    # MLX's own cosine has the digits of fp32 alone, in float64 too.
    cosine, sine = (mx.array(of(angles), dtype=mx.float64) for of in (np.cos, np.sin))
    rows = (x[..., :width] * inverse_rms(x[..., :width], eps) * weight).swapaxes(1, 2)
    one, other, unturned = mx.split(rows, [half, rotary_dims], axis=-1)
    y = mx.concatenate([one * cosine - other * sine, other * cosine + one * sine, unturned], axis=-1)
    return (y, mx.sigmoid(x[..., width:])) if gated else (y,)
