"""RMS norms over the last axis: with a constant factor, with a weight and the silu of a gate, or beside a gate."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..kernels.launch import Launch, Outputs, numbers
from ..operator.kernel_operator import KernelWorkload
from ..recomputation import large_enough
from .passes import Arrays, Passes, by_lane, pieces_of, wide

# The supported widths: a row takes 1 to 32 lanes of one group, a power of two, with eight elements each.
WIDTHS = (8, 16, 32, 64, 128, 256)
_COUNT = "(long)x_shape[0]"
# A weight's gradient is summed in so many parts of the rows, of which each has so many rows at least.
_FEWEST_PARTS, _MOST_PARTS, _ROWS_OF_A_PART = 16, 4096, 16


def norm(x: mx.array, factor: float, eps: float) -> mx.array:
    """Return factor * x / sqrt(mean(x^2) + eps), computed in fp32, with one kernel forward and one backward.

    x is [..., W], W one of WIDTHS, and else a ValueError; the result has its shape and dtype.
    """
    passes = _norm(_width(x), float(factor), float(eps))
    return passes(x.reshape(-1, 8))[0].reshape(x.shape)


def gated_norm(x: mx.array, weight: mx.array, gate: mx.array, eps: float) -> mx.array:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(gate), computed in fp32, with one kernel each way.

    x [..., W], W one of WIDTHS, the gate and the result have one shape and dtype, the weight is [W]; and else a
    ValueError. Source: `RMSNormGated` of mlx_lm/models/qwen3_next.py and of transformers, which round the norm before
    they multiply it by the weight.
    """
    if gate.shape != x.shape or gate.dtype != x.dtype or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"gated_norm: x {x.shape} {x.dtype}, gate {gate.shape} {gate.dtype} and weight {weight.shape} do not fit; "
            "expected a gate like x, and a weight of x's last axis."
        )
    passes = _gated(_width(x), float(eps))
    return passes(x, gate, weight)[0]


def norm_and_gate(x: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Return a / sqrt(mean(a^2) + eps) * weight and sigmoid(b) for the halves a and b of x's last axis.

    x is [..., 2 W], W one of WIDTHS, and the weight [W], or ValueError. One kernel computes both results, [..., W] in
    x's dtype, in fp32, and one their gradient, so that neither half is ever copied. Source: the queries and the gate of
    `Qwen3NextAttention` in mlx_lm/models/qwen3_next.py.
    """
    if not covers_halves(x, weight):
        raise ValueError(
            f"norm_and_gate: x {x.shape} {x.dtype} and weight {weight.shape} do not fit; expected floats [..., 2 W], "
            f"W one of {WIDTHS}, and a weight [W]."
        )
    shape = (*x.shape[:-1], weight.shape[0])
    y, gate = _halves(weight.shape[0], float(eps))(x.reshape(-1, 8), weight)
    return y.reshape(shape), gate.reshape(shape)


def covers_halves(x: mx.array, weight: mx.array) -> bool:
    """Whether the kernels of `norm_and_gate` can compute with these arrays."""
    fits = weight.ndim == 1 and weight.shape[0] in WIDTHS and x.shape[-1] == 2 * weight.shape[0]
    return fits and x.size > 0 and mx.issubdtype(x.dtype, mx.floating)


def norm_and_gate_serves(x: mx.array, weight: mx.array, eps: float) -> bool:
    """Whether `norm_and_gate` is to be used: the kernels cover the arrays, are faster, and were found right here."""
    return (
        large_enough(x)
        and covers_halves(x, weight)
        and _halves(weight.shape[0], float(eps)).passes_trial(((192, 8), x.dtype), (weight.shape, weight.dtype))
    )


def covers(x: mx.array, *others: mx.array) -> bool:
    """Whether the kernels can compute with x, and with a gate if one is given."""
    match = all(other.shape == x.shape and other.dtype == x.dtype for other in others)
    return match and x.size > 0 and mx.issubdtype(x.dtype, mx.floating) and x.shape[-1] in WIDTHS


def norm_serves(x: mx.array, factor: float, eps: float) -> bool:
    """Whether `norm` is to be used: the kernels cover x, are faster, and were found right on this machine."""
    return (
        large_enough(x) and covers(x) and _norm(_width(x), float(factor), float(eps)).passes_trial(((96, 8), x.dtype))
    )


def gated_norm_serves(x: mx.array, weight: mx.array, gate: mx.array, eps: float) -> bool:
    """Whether `gated_norm` is to be used: the kernels cover these arrays, are faster, and were found right here."""
    return (
        large_enough(x)
        and covers(x, gate)
        and _gated(_width(x), float(eps)).passes_trial(
            *[((3, 32, _width(x)), x.dtype)] * 2, (weight.shape, weight.dtype)
        )
    )


def _width(x: mx.array) -> int:
    if not covers(x):
        raise ValueError(f"norm: x must be floats [..., W] with W one of {WIDTHS}, got {list(x.shape)} {x.dtype}.")
    return x.shape[-1]


def inverse_rms(x: mx.array, eps: float) -> mx.array:
    """Return 1 / sqrt(mean(x^2) + eps) of rows x [..., W], [..., 1] in fp32 or float64."""
    return mx.rsqrt(mx.square(wide(x)).mean(axis=-1, keepdims=True) + eps)


@cache
def _norm(width: int, factor: float, eps: float) -> Passes:
    lanes = (width // 8,)

    def forward(x: mx.array) -> Launch:
        inputs = {"numbers": numbers(factor, eps), "x": x}
        return by_lane("norm_forward", inputs, {"y": (x.shape, x.dtype)}, (_COUNT,), x.shape[0], lanes)

    def backward(x: mx.array, dy: mx.array) -> Launch:
        inputs = {"numbers": numbers(factor, eps), "x": x, "dy": dy.astype(x.dtype)}
        return by_lane("norm_backward", inputs, {"dx": (x.shape, x.dtype)}, (_COUNT,), x.shape[0], lanes)

    def plain(x: mx.array) -> Arrays:
        rows = x.reshape(-1, width)
        return [(factor * rows * inverse_rms(rows, eps)).reshape(x.shape)]

    return Passes(f"norm of {width} ({factor}, {eps})", forward, backward, plain)


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


@cache
def _halves(width: int, eps: float) -> Passes:
    first, lanes = ("(long)x_shape[0] / 2", f"{eps!r}f"), (width // 8,)

    def forward(x: mx.array, weight: mx.array) -> Launch:
        inputs = {"x": x, "weight": weight}
        outputs: Outputs = dict.fromkeys(("y", "gate"), ((x.shape[0] // 2, 8), x.dtype))
        return by_lane("norm_and_gate_forward", inputs, outputs, first, x.shape[0] // 2, lanes)

    def backward(x: mx.array, weight: mx.array, dy: mx.array, dgate: mx.array) -> Launch:
        inputs = {"x": x, "weight": weight, "dy": dy.astype(x.dtype), "dgate": dgate.astype(x.dtype)}
        return by_lane("norm_and_gate_backward", inputs, {"dx": (x.shape, x.dtype)}, first, x.shape[0] // 2, lanes)

    def parameters(primals: Arrays, cotangents: Arrays) -> list[mx.array]:
        x, weight = primals
        rows = x.reshape(-1, 2, width)[:, 0].astype(mx.float32)
        d_weight = cotangents[0].reshape(-1, width).astype(mx.float32) * rows * inverse_rms(rows, eps)
        return [d_weight.sum(axis=0).astype(weight.dtype)]

    def plain(x: mx.array, weight: mx.array) -> Arrays:
        rows, gates = (half.squeeze(1) for half in mx.split(x.reshape(-1, 2, width), 2, axis=1))
        return [(rows * inverse_rms(rows, eps) * weight).reshape(-1, 8), mx.sigmoid(gates).reshape(-1, 8)]

    return Passes(f"norm and gate of {width} ({eps})", forward, backward, plain, parameters)


def workloads(quick: bool) -> list[KernelWorkload]:
    """Return the workloads that the self-test compares with float64."""
    rows, width, eps = (24, 64, 1e-6) if quick else (131_072, 128, 1e-6)
    pieces = (rows * width // 8, 8)
    return [
        *_norm(width, 0.25, eps).workloads("norm", [pieces]),
        *_gated(width, eps).workloads("gated norm", [(rows, width), (rows, width), (width,)]),
        *_halves(width, eps).workloads("norm and gate", [(2 * pieces[0], 8), (width,)]),
    ]
