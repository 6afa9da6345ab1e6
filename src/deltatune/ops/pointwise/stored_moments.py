"""Numbers in 8 bits, block-wise dynamic quantisation (arXiv 2110.02861), and a step of Adam on moments stored so.

A block of numbers shares one scale, its largest magnitude. A number divided by it is stored as its decade, from 1e-7 to
1, and as one of the decade's equal intervals; larger decades have more intervals. Its value is the middle of the
interval. 0 and 1 have codes of their own.

By MLX's operations a step passes over each number some fifty times; the kernel passes over it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import mlx.core as mx
import mlx.optimizers
import numpy as np

from ..kernels.launch import Arrays, Device, Outputs
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator
from ..operator.measure import random_arrays
from .adam import BOUNDS, TRIED, AdamStep, tried_steps
from .passes import by_lane, size_of

# The numbers that share a scale, as in bitsandbytes.
BLOCK = 256
_DECADES = 7
# A trial allows that a code is its neighbour, where a number lies at the edge of an interval.
_NEIGHBOUR = 1 / 255 + 1e-6


@cache
def values(signed: bool) -> mx.array:
    """Return the value of each code, [256] fp32: 0, the positive ones ascending up to 1, then the negative ones.

    Unless half of the codes are `signed`, each decade has twice as many intervals.
    """
    positive = [0.0]
    for decade in range(_DECADES):
        edges = np.linspace(0.1, 1.0, _intervals(decade, signed) + 1) * 10.0 ** (decade - _DECADES + 1)
        positive += list((edges[:-1] + edges[1:]) / 2)
    negative = [-value for value in positive[1:]] if signed else []
    return mx.array(np.array([*positive, 1.0, *negative], np.float32))


def _intervals(decade: int, signed: bool) -> int:
    return 2 ** (decade + (0 if signed else 1))


def quantized(x: mx.array, signed: bool) -> tuple[mx.array, mx.array]:
    """Return the codes of x, uint8 in its shape, and the scales of its blocks, [ceil(size / BLOCK)] fp32.

    Unless it is `signed`, no number is negative, and one above 0 never becomes 0, since Adam divides by its root.
    """
    flat = x.reshape(-1)
    blocks = mx.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    scales = mx.abs(blocks).max(axis=1)
    share = mx.abs(blocks) / mx.where(scales > 0, scales, 1.0)[:, None]
    # The decade is the largest, 6, for shares above 0.1, and 0 for those below 1e-6.
    decade = mx.clip(_DECADES - 1 + mx.ceil(mx.log10(share)), 0, _DECADES - 1)
    intervals = mx.power(2.0, decade if signed else decade + 1)
    within = share * mx.power(10.0, _DECADES - 1 - decade)
    interval = mx.clip(mx.floor((within - 0.1) / 0.9 * intervals), 0, intervals - 1)
    code = intervals + interval - (0 if signed else 1)
    table = values(signed)
    top = 128 if signed else 255
    code = mx.where(share >= (1.0 + table[top - 1]) / 2, top, code)
    if signed:
        code = mx.where(share < table[1] / 2, 0, mx.where(blocks < 0, code + 128, code))
        # The negative codes have no -1.
        code = mx.where(code > 255, 255, code)
    else:
        code = mx.where(share > 0, code, 0)
    return code.astype(mx.uint8).reshape(-1)[: flat.size].reshape(x.shape), scales


def dequantized(codes: mx.array, scales: mx.array, signed: bool) -> mx.array:
    """Return the numbers that quantized() has stored, fp32 in the shape of `codes`."""
    flat = values(signed)[codes.reshape(-1)]
    blocks = mx.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK) * scales[:, None]
    return blocks.reshape(-1)[: flat.size].reshape(codes.shape)


@dataclass(frozen=True)
class EightBitStep:
    """A step of Adam on moments of 8 bits, for adam_step_8bit in kernels/passes/stored_moments.h."""

    numbers: AdamStep
    # The arrays that a step replaces, by their names in an optimizer's state.
    moments: ClassVar[tuple[str, ...]] = ("m", "m_scale", "v", "v_scale")

    def serves(self, parameter: mx.array, gradient: mx.array) -> bool:
        """Whether the kernel takes arrays of these dtypes, and was found right with them on this machine."""
        dtypes = parameter.dtype, gradient.dtype
        return all(dtype in BOUNDS for dtype in dtypes) and OPERATOR.serves(*dtypes)

    def __call__(self, parameter: mx.array, gradient: mx.array, *moments: mx.array) -> list[mx.array]:
        """Return the new parameter, and the new arrays for the names in EightBitStep.moments.

        The moments are the codes of m, uint8 in the parameter's shape, the scales of its blocks, [ceil(size / BLOCK)]
        fp32, and those of v.
        """
        inputs: Arrays = {"fixed": self.numbers.fixed, "moving": self.numbers.moving}
        inputs |= {"signs": values(signed=True), "magnitudes": values(signed=False)}
        inputs |= {"parameter": parameter, "gradient": gradient} | dict(zip(self.moments, moments, strict=True))
        outputs: Outputs = {
            f"new_{name}": (inputs[name].shape, inputs[name].dtype) for name in ("parameter", *self.moments)
        }
        lanes = 32 * moments[1].size
        return by_lane("adam_step_8bit", inputs, outputs, (size_of("parameter", parameter),), lanes)()


def trial_case(dtype: mx.Dtype, gradient_dtype: mx.Dtype) -> Case[Device]:
    """Return the case of parameters and gradients of these dtypes: some steps, as MLX's operations make them.

    Moments spread over all decades; the last block is not full, and its last piece is not whole.
    """
    shape = (5, 131)
    parameter, gradient, m, v = random_arrays([(shape, dtype), (shape, gradient_dtype), *[(shape, mx.float32)] * 2])
    spread = mx.power(10.0, mx.linspace(-7, 0, parameter.size)).reshape(shape)
    moments = [*quantized(m * spread, signed=True), *quantized(v.square() * spread, signed=False)]
    scale = mx.array(0.5)

    def step(optimizer: mlx.optimizers.AdamW, healthy: bool) -> list[mx.array]:
        return EightBitStep(AdamStep.begun(optimizer, scale, mx.array(healthy)))(parameter, gradient, *moments)

    def plain(optimizer: mlx.optimizers.AdamW, healthy: bool) -> list[mx.array]:
        before, d = parameter.astype(mx.float32), gradient.astype(mx.float32) * scale
        new = {"m": dequantized(moments[0], moments[1], signed=True)}
        new["v"] = dequantized(moments[2], moments[3], signed=False)
        moved = optimizer.apply_single(d, before, new)
        stored = [*quantized(new["m"], signed=True), *quantized(new["v"], signed=False)]
        return [moved, *stored] if healthy else [before, *moments]

    names = [f"{name} of step {i}" for i in range(TRIED) for name in ("parameter", *EightBitStep.moments)]
    bounds = {name: _NEIGHBOUR for name in names if name.startswith(("m of", "v of"))}
    described = f"Adam's step on moments of 8 bits in {dtype}, gradients of {gradient_dtype}"
    return Case(
        name=described,
        results=names,
        call=by_kernels(lambda: tried_steps(step)),
        truth=lambda: tried_steps(plain),
        bound=BOUNDS[dtype],
        bounds=bounds,
        like=[parameter, gradient, *moments],
    )


OPERATOR = KernelOperator("Adam on 8 bits", trial_case)
