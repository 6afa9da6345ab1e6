"""Adam and AdamW whose moments take 8 bits a number: block-wise dynamic quantisation, arXiv 2110.02861.

A block of numbers shares one scale, its largest magnitude. A number divided by it is stored as the decade that it lies
in, from 1e-7 to 1, and as one of the equal intervals of that decade; larger decades have more intervals. Its value is
the middle of the interval. 0 and 1 have codes of their own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.optimizers
import numpy as np

# The numbers that share a scale, and the size from which a parameter's moments are quantised, as in bitsandbytes.
BLOCK, SMALLEST = 256, 4096
# A large parameter is updated in pieces, so that its moments are in fp32 for one piece at a time. Whole blocks.
PIECE = 2**22
_DECADES = 7


@cache
def values(signed: bool) -> mx.array:
    """Return the value of each code, [256] fp32: 0, the positive ones ascending up to 1, then the negative ones.

    Args:
        signed: whether half of the codes are negative; otherwise each decade has twice as many intervals.
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

    Args:
        x: the numbers, of which none is negative unless `signed`. One above 0 that is not signed never becomes 0, since
            Adam divides by its root.
        signed: as for values().
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


class _EightBit(mlx.optimizers.Adam):
    """Adam, or a class after it in a subclass, with moments in 8 bits and arithmetic in fp32."""

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Make the moments of a parameter: in fp32 below SMALLEST numbers, else codes and scales."""
        if parameter.size < SMALLEST:
            super().init_single(parameter, state)
            return
        for name in ("m", "v"):
            state[name] = mx.zeros(parameter.shape, mx.uint8)
            state[f"{name}_scale"] = mx.zeros(-(-parameter.size // BLOCK))

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """Return the updated parameter, and replace the moments in `state`."""
        if "m_scale" not in state:
            return super().apply_single(gradient, parameter, state)
        flat = {"gradient": gradient, "parameter": parameter, "m": state["m"], "v": state["v"]}
        flat = {name: array.reshape(-1) for name, array in flat.items()}
        done: list[list[mx.array]] = []
        for start in range(0, parameter.size, PIECE):
            part = {name: array[start : start + PIECE] for name, array in flat.items()}
            if done:
                part["gradient"] = mx.depends([part["gradient"]], done[-1])[0]
            scales = {name: state[f"{name}_scale"][start // BLOCK : (start + PIECE) // BLOCK] for name in ("m", "v")}
            done.append(self._piece(part, scales))
        updated, m, m_scale, v, v_scale = (mx.concatenate(list(each)) for each in zip(*done, strict=True))
        state |= {"m": m.reshape(parameter.shape), "v": v.reshape(parameter.shape)}
        state |= {"m_scale": m_scale, "v_scale": v_scale}
        return updated.reshape(parameter.shape)

    def _piece(self, part: dict[str, mx.array], scales: dict[str, mx.array]) -> list[mx.array]:
        """Return the updated numbers, and the codes and scales of both moments."""
        moments = {name: dequantized(part[name], scales[name], signed=name == "m") for name in ("m", "v")}
        gradient, parameter = part["gradient"].astype(mx.float32), part["parameter"]
        updated = super().apply_single(gradient, parameter.astype(mx.float32), moments).astype(parameter.dtype)
        return [updated, *quantized(moments["m"], signed=True), *quantized(moments["v"], signed=False)]


class Adam8bit(_EightBit):
    """Adam with moments in 8 bits."""


class AdamW8bit(_EightBit, mlx.optimizers.AdamW):
    """AdamW with moments in 8 bits."""
