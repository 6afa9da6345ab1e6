"""Activations and gated norms, computed in the way that is the fastest on MLX's device.

On NVIDIA GPUs kernels compute them. Where these do not serve, `plain`, the function of upstream, does; its gradient
keeps the inputs alone where that pays (recomputation.py). A decoder takes no gradient, so that kernels gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..causal_conv import joined_conv
from ..recomputation import from_inputs, keeps_inputs_alone, remembered
from . import conv, norms, silu

Plain = Callable[..., mx.array]


def swiglu(gate: mx.array, x: mx.array, plain: Plain, *, decoding: bool) -> mx.array:
    """Return silu(gate) * x, which plain(gate, x) returns, too."""
    if decoding:
        return plain(gate, x)
    if silu.serves(gate, x):
        return remembered(lambda *inputs: [silu.swiglu(*inputs)], gate, x)[0]
    return remembered(lambda *inputs: from_inputs(lambda *arrays: [plain(*arrays)], *inputs), gate, x)[0]


def silu_of_convolution(
    y: mx.array, x: mx.array, weight: mx.array, segments: mx.array | None, plain: Plain
) -> mx.array:
    """Return silu(y) = plain(y) of the convolution y of x [B, K - 1 + T, C] with weight [C, K]."""
    if conv.serves(x, weight, segments):
        return conv.conv_silu(x, weight, segments)
    if not keeps_inputs_alone():
        return plain(y)
    return from_inputs(lambda x, weight: [plain(joined_conv(x, weight, segments))], x, weight)[0]


def gated_norm(x: mx.array, weight: mx.array, gate: mx.array, eps: float, plain: Plain, *, decoding: bool) -> mx.array:
    """Return the RMS norm of x, with its weight, times silu(gate), which plain(gate, x, weight) returns, too."""
    if decoding:
        return plain(gate, x, weight)
    if norms.gated_norm_serves(x, weight, gate, eps):
        return norms.gated_norm(x, weight, gate, eps)
    # MLX adds up gradients in the order of the arguments, which is upstream's.
    return from_inputs(lambda *arrays: [plain(*arrays)], gate, x, weight)[0]
