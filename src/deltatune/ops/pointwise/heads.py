"""The operations around a layer's attention: norm, rotary embedding and gate before it, and the gate's product after.

Projections have one token after the other, [B, T, H, W], and attention takes one head after the other, [B, H, T, W].
The kernels read the one and write the other, so that nothing is copied from one order to the other by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from ..kernels.launch import ABSENT, Launch, Outputs
from ..operator.kernel_operator import KernelWorkload
from ..recomputation import large_enough
from .norms import WIDTHS, inverse_rms
from .passes import Arrays, Passes, by_lane

# The supported rotary dimensions: two elements that turn together are in lanes with numbers that differ in one bit.
ROTARY = (16, 32, 64, 128, 256)
# A lane computes up to so many heads of its token, a power of two, for which it computes sines and cosines once.
MOST_HEADS = 4


def turned_heads(
    x: mx.array, weight: mx.array, eps: float, rotary_dims: int, base: float, gated: bool
) -> list[mx.array]:
    """Return the normed and turned heads of x for attention, and the sigmoid of their gates if they have any.

    A head h becomes h / sqrt(mean(h^2) + eps) * weight. Its elements i and i + rotary_dims / 2 then turn by the angle t
    base^(-2i / rotary_dims) at position t. One kernel computes all of it in fp32, and one its gradient.

    x is [B, T, H, W], W one of WIDTHS, or [B, T, H, 2 W] if gated, with the gate in each head's second half; the weight
    is [W], and rotary_dims one of ROTARY. The result is [B, H, T, W] in x's dtype, and the gates' [B, T, H, W].
    `serves` says whether arrays fit. Source: `Qwen3NextAttention` of mlx_lm/models/qwen3_next.py, with
    `mx.fast.rope` (traditional=False).
    """
    form = _form(x, weight, eps, rotary_dims, base, gated)
    return _turned(form)(x, weight, frequencies(rotary_dims, float(base)))


def times_gate(y: mx.array, gate: mx.array) -> mx.array:
    """Return attention's output y [B, H, T, W] times a gate [B, T, H, W], as the gate lies, with one kernel each way.

    W is a multiple of 8, and both have one dtype, or `serves_gate` is false.
    """
    return _gated(y.shape[-1])(y, gate)[0]


def serves(x: mx.array, weight: mx.array, eps: float, rotary_dims: int, base: float, gated: bool) -> bool:
    """Whether `turned_heads` is to be used: the kernels cover the arrays, are faster, and were found right here."""
    width = weight.shape[0]
    fits = x.ndim == 4 and x.shape[-1] == width * (2 if gated else 1) and width in WIDTHS
    fits = fits and rotary_dims in ROTARY and rotary_dims <= width and mx.issubdtype(x.dtype, mx.floating)
    if not fits or not x.size or not large_enough(x):
        return False
    form = _form(x, weight, eps, rotary_dims, base, gated)
    shape = (2, 37, 3 * form.heads, x.shape[-1])
    others = [frequencies(rotary_dims, float(base))]
    return _turned(form).passes_trial((shape, x.dtype), (weight.shape, weight.dtype), others=others)


def serves_gate(y: mx.array, gate: mx.array) -> bool:
    """Whether `times_gate` is to be used: the kernels cover the arrays, are faster, and were found right here."""
    batch, heads, length, width = y.shape
    fits = gate.shape == (batch, length, heads, width) and gate.dtype == y.dtype and width % 8 == 0
    if not fits or not large_enough(y) or not mx.issubdtype(y.dtype, mx.floating):
        return False
    return _gated(width).passes_trial(((2, 3, 37, width), y.dtype), ((2, 37, 3, width), y.dtype))


@dataclass(frozen=True)
class _Form:
    """The parameters of the kernels' text: a row's elements, a lane's heads, turning elements; and the constants."""

    width: int
    heads: int
    rotary_dims: int
    base: float
    eps: float
    gated: bool

    @property
    def name(self) -> str:
        what = "turned heads and gates" if self.gated else "turned heads"
        return f"{what} of {self.width} ({self.heads} a lane, {self.rotary_dims} turn, {self.base}, {self.eps})"

    def launch(self, name: str, inputs: dict[str, mx.array], outputs: Outputs, last: tuple[str, ...]) -> Launch:
        batch, length, heads, _ = inputs["x"].shape
        lanes = self.width // 8
        first = ("(long)x_shape[0] * x_shape[1]", "x_shape[1]", "x_shape[2]", f"{self.eps!r}f")
        constants = (lanes, self.heads, self.rotary_dims, int(self.gated))
        count = batch * length * (heads // self.heads) * lanes
        return by_lane(name, inputs, outputs, (*first, "x", "weight", "frequencies", *last), count, constants)


def _form(x: mx.array, weight: mx.array, eps: float, rotary_dims: int, base: float, gated: bool) -> _Form:
    heads = MOST_HEADS
    while x.shape[2] % heads:
        heads //= 2
    return _Form(weight.shape[0], heads, rotary_dims, float(base), float(eps), gated)


@cache
def frequencies(rotary_dims: int, base: float) -> mx.array:
    """The angles at position 1, [rotary_dims / 2] in fp32: the same array at every call."""
    return mx.array((base ** (-2.0 * np.arange(rotary_dims // 2) / rotary_dims)).astype(np.float32))


def _turn(form: _Form, rows: mx.array, scale: float) -> mx.array:
    """Turn rows [B, H, T, W] by MLX's operation: forwards by a scale of 1, back by -1."""
    return mx.fast.rope(rows, form.rotary_dims, traditional=False, base=form.base, scale=scale, offset=0)


@cache
def _turned(form: _Form) -> Passes:
    def forward(x: mx.array, weight: mx.array, frequencies: mx.array) -> Launch:
        batch, length, heads, _ = x.shape
        inputs = {"x": x, "weight": weight, "frequencies": frequencies}
        outputs: Outputs = {"y": ((batch, heads, length, form.width), x.dtype)}
        if form.gated:
            outputs["gate"] = (batch, length, heads, form.width), x.dtype
        return form.launch("turned_heads_forward", inputs, outputs, ("y", "gate" if form.gated else ABSENT))

    def backward(x: mx.array, weight: mx.array, frequencies: mx.array, *cotangents: mx.array) -> Launch:
        inputs = {"x": x, "weight": weight, "frequencies": frequencies}
        inputs |= {f"d{name}": d.astype(x.dtype) for name, d in zip(("y", "gate"), cotangents, strict=False)}
        last = ("dy", "dgate" if form.gated else ABSENT, "dx")
        return form.launch("turned_heads_backward", inputs, {"dx": (x.shape, x.dtype)}, last)

    def parameters(primals: Arrays, cotangents: Arrays) -> list[mx.array]:
        x, weight, _ = primals
        rows = x[..., : form.width].astype(mx.float32)
        turned_back = _turn(form, cotangents[0].astype(mx.float32), -1.0).swapaxes(1, 2)
        d_weight = turned_back * rows * inverse_rms(rows, form.eps)
        return [d_weight.sum(axis=(0, 1, 2)).astype(weight.dtype)]

    def plain(x: mx.array, weight: mx.array, _frequencies: mx.array) -> Arrays:
        rows, *gates = mx.split(x, 2, axis=-1) if form.gated else [x]
        normed = rows * inverse_rms(rows, form.eps) * weight
        return [_turn(form, normed.swapaxes(1, 2), 1.0), *map(mx.sigmoid, gates)]

    return Passes(form.name, forward, backward, plain, parameters, fixed=1)


@cache
def _gated(width: int) -> Passes:
    first = ("(long)gate_shape[0] * gate_shape[1]", "gate_shape[1]", "gate_shape[2]")

    def forward(y: mx.array, gate: mx.array) -> Launch:
        inputs = {"y": y, "gate": gate}
        arguments = (*first, "y", "gate", "out")
        return by_lane(
            "times_gate_forward", inputs, {"out": (gate.shape, y.dtype)}, arguments, y.size // 8, (width // 8,)
        )

    def backward(y: mx.array, gate: mx.array, d: mx.array) -> Launch:
        inputs = {"y": y, "gate": gate, "d": d.astype(y.dtype)}
        outputs: Outputs = {"dy": (y.shape, y.dtype), "dgate": (gate.shape, y.dtype)}
        return by_lane("times_gate_backward", inputs, outputs, first, y.size // 8, (width // 8,))

    def plain(y: mx.array, gate: mx.array) -> Arrays:
        return [y.swapaxes(1, 2) * gate]

    return Passes(f"times gate of {width}", forward, backward, plain)


def workloads(quick: bool) -> list[KernelWorkload]:
    """Return the workloads that the self-test compares with float64.

    There are few tokens and many rows: fp32 rounds the angles of later tokens by more than a bound for sums.
    """
    batch, length, heads, width = (2, 19, 4, 64) if quick else (64, 64, 16, 128)
    compared = _gated(width).workloads("times gate", [(batch, heads, length, width), (batch, length, heads, width)])
    for gated, name in ((True, "turned heads and gates"), (False, "turned heads")):
        form = _Form(width, MOST_HEADS, width // 2, 1e7, 1e-6, gated)
        shapes = [(batch, length, heads, 2 * width if gated else width), (width,)]
        compared += _turned(form).workloads(name, shapes, frequencies(form.rotary_dims, form.base))
    return compared
