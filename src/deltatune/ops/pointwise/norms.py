"""RMS norms over the last axis, times a weight and the silu of a gate."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..kernels.launch import Launch, Outputs
from ..operator.kernel_operator import KernelWorkload
from ..recomputation import large_enough
from .passes import Arrays, Passes, by_lane, pieces_of, wide

# The supported widths: a row takes 1 to 32 lanes of one group, a power of two, with eight elements each.
WIDTHS = (8, 16, 32, 64, 128, 256)
# A weight's gradient is summed in so many parts of the rows, of which each has so many rows at least.
_FEWEST_PARTS, _MOST_PARTS, _ROWS_OF_A_PART = 16, 4096, 16


def gated_norm(x: mx.array, weight: mx.array, gate: mx.array, eps: float) -> mx.array:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(gate), computed in fp32, with one kernel each way.

    x [..., W], W one of WIDTHS, the gate and the result have one shape and dtype, and the weight is [W], or
    `gated_norm_serves` is false. Source: `RMSNormGated` of mlx_lm/models/qwen3_next.py and of transformers, which round
    the norm before they multiply it by the weight.
    """
    return _gated(x.shape[-1], float(eps))(x, gate, weight)[0]


def gated_norm_serves(x: mx.array, weight: mx.array, gate: mx.array, eps: float) -> bool:
    """Whether `gated_norm` is to be used: the kernels cover these arrays, are faster, and were found right here."""
    width = x.shape[-1]
    if not large_enough(x) or not mx.issubdtype(x.dtype, mx.floating) or width not in WIDTHS:
        return False
    if gate.shape != x.shape or gate.dtype != x.dtype or weight.shape != (width,):
        return False
    return _gated(width, float(eps)).passes_trial(*[((3, 32, width), x.dtype)] * 2, (weight.shape, weight.dtype))


def inverse_rms(x: mx.array, eps: float) -> mx.array:
    """Return 1 / sqrt(mean(x^2) + eps) of rows x [..., W], [..., 1] in fp32 or float64."""
    return mx.rsqrt(mx.square(wide(x)).mean(axis=-1, keepdims=True) + eps)


@cache
def _gated(width: int, eps: float) -> Passes:
    def first(x: mx.array) -> tuple[str, str]:
        return pieces_of("x", x), f"{eps!r}f"

    def forward(x: mx.array, gate: mx.array, weight: mx.array) -> Launch:
        inputs = {"x": x, "weight": weight, "gate": gate}
        return by_lane("gated_norm_forward", inputs, {"y": (x.shape, x.dtype)}, first(x), x.size // 8, (width // 8,))

    def backward(x: mx.array, gate: mx.array, weight: mx.array, dy: mx.array) -> Launch:
        inputs = {"x": x, "weight": weight, "gate": gate, "dy": dy.astype(x.dtype)}
        outputs = dict.fromkeys(("dx", "dgate"), (x.shape, x.dtype))
        return by_lane(
            "gated_norm_backward", inputs, outputs, (*first(x), *inputs, *outputs), x.size // 8, (width // 8,)
        )

    def parameters(primals: Arrays, cotangents: Arrays) -> list[mx.array]:
        x, gate, weight = primals
        parts = _FEWEST_PARTS
        while parts < _MOST_PARTS and parts * _ROWS_OF_A_PART * width < x.size:
            parts *= 2
        inputs = {"x": x, "gate": gate, "dy": cotangents[0].astype(x.dtype)}
        outputs: Outputs = {"dweight": ((parts, width), mx.float32)}
        lanes = width // 8
        (d_weight,) = by_lane("gated_norm_weight", inputs, outputs, first(x), parts * lanes, (lanes, parts))()
        return [d_weight.sum(axis=0).astype(weight.dtype)]

    def plain(x: mx.array, gate: mx.array, weight: mx.array) -> Arrays:
        rows, gates = x.reshape(-1, width), gate.reshape(-1, width)
        return [(rows * inverse_rms(rows, eps) * weight * gates * mx.sigmoid(gates)).reshape(x.shape)]

    return Passes(f"gated norm of {width} ({eps})", forward, backward, plain, parameters)


def workloads(quick: bool) -> list[KernelWorkload]:
    """Return the workloads that the self-test compares with float64."""
    rows, width, eps = (24, 64, 1e-6) if quick else (131_072, 128, 1e-6)
    return _gated(width, eps).workloads("gated norm", [(rows, width), (rows, width), (width,)])
