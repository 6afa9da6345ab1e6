"""The short causal convolution of a gated-delta layer, together with the silu that follows it."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..causal_conv import causal_conv
from ..kernels.launch import ABSENT, Outputs
from .pass_launch import Execute, Pass
from .passes import LEAST, Arrays, Passes

# How many tokens one lane computes.
ROWS = 8
# The filter lengths K that the kernels support.
TAPS = (2, 3, 4)


def conv_silu(
    x: mx.array, weight: mx.array, segments: mx.array | None = None, *, execute: Execute = Pass.run
) -> mx.array:
    """Return silu of the depthwise causal convolution, computed in fp32, with one kernel forward and one backward.

    Args:
        x: [B, K - 1 + T, C] floats, C a multiple of 8: the state of K - 1 inputs, oldest first, then the tokens.
        weight: [C, K], K from 2 to 4.
        segments: [B, T] integers, non-decreasing along T; an output depends on inputs of its own segment only. The
            state counts as part of the first segment.
        execute: runs a launch; tests run it on the host machine.

    Returns:
        [B, T, C], in x's dtype.

    Raises:
        ValueError: `covers` refuses the arrays.
    """
    if not covers(x, weight):
        raise ValueError(f"conv_silu: x must be [B, K - 1 + T, 8 n], weight [8 n, K], got {x.shape}, {weight.shape}.")
    extra = [] if segments is None else [mx.stop_gradient(segments).astype(mx.int32)]
    return _passes(segments is not None)(x, weight, *extra, execute=execute)[0]


def covers(x: mx.array, weight: mx.array) -> bool:
    """Whether the kernels can compute with arrays of these shapes and dtypes."""
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] not in TAPS:
        return False
    return mx.issubdtype(x.dtype, mx.floating) and x.shape[2] % 8 == 0 and x.shape[1] >= weight.shape[1] and x.size > 0


def serves(x: mx.array, weight: mx.array, segments: mx.array | None = None) -> bool:
    """Whether `conv_silu` is to be used: the kernels cover these arrays, are faster, and were found right here."""
    if x.size < LEAST or not covers(x, weight):
        return False
    taps, batch, channels, length = weight.shape[1], 3, 24, 2 * ROWS + 5
    documents = mx.broadcast_to(mx.arange(length) // 7, (batch, length))
    return _passes(segments is not None).passes_trial(
        ((batch, taps - 1 + length, channels), x.dtype),
        ((channels, taps), weight.dtype),
        others=[] if segments is None else [documents],
    )


def _plain(x: mx.array, weight: mx.array, segments: mx.array | None = None) -> Arrays:
    history = weight.shape[1] - 1
    y, _ = causal_conv(x[:, history:], weight, initial_state=x[:, :history], segments=segments)
    return [y * mx.sigmoid(y)]


@cache
def _passes(segmented: bool) -> Passes:
    names = ("x", "weight", "segments")[: 2 + segmented]
    first = ("(long)x_shape[0]", "x_shape[1]", "x_shape[2]", "x", "weight", "segments" if segmented else ABSENT)

    def launch(name: str, arrays: Arrays, more: dict[str, mx.array], out: str, rows: int) -> Pass:
        """Describe the launch of the kernel body `name`, whose output `out` is [B, rows, C]."""
        x, weight, *_ = arrays
        inputs = dict(zip(names, arrays, strict=True)) | more
        outputs: Outputs = {out: ((x.shape[0], rows, x.shape[2]), x.dtype)}
        lanes = x.shape[0] * -(-rows // ROWS) * (x.shape[2] // 8)
        return Pass(name, inputs, outputs, (*first, *more, out), lanes, (weight.shape[1], ROWS))

    def forward(x: mx.array, weight: mx.array, *rest: mx.array) -> Pass:
        return launch("conv_silu_forward", (x, weight, *rest), {}, "y", x.shape[1] - weight.shape[1] + 1)

    def backward(x: mx.array, *rest: mx.array) -> Pass:
        *others, dy = rest
        return launch("conv_silu_backward", (x, *others), {"dy": dy.astype(x.dtype)}, "dx", x.shape[1])

    def parameters(primals: Arrays, cotangents: Arrays) -> list[mx.array]:
        # x is an argument: mx.vjp walks through everything that an array which is none was computed from.
        return mx.vjp(lambda *arrays: list(_plain(*arrays)), list(primals), list(cotangents))[1][1:2]

    name = "conv and silu of documents" if segmented else "conv and silu"
    return Passes(name, forward, backward, _plain, parameters, fixed=int(segmented))
