"""Adam and AdamW with moments of 8 bits a number, as ops/pointwise/stored_moments.py stores them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.optimizers

from ...ops.pointwise.stored_moments import BLOCK, dequantized, quantized

# The size from which a parameter's moments are quantised, as in bitsandbytes.
SMALLEST = 4096
# Without the kernel, a large parameter is updated in pieces, so that its moments are in fp32 for one piece at a time.
# Whole blocks.
PIECE = 2**22


def is_stored_in_8_bits(state: dict[str, Any]) -> bool:
    """Whether the moments in the state of a parameter are codes and scales."""
    return "m_scale" in state


class EightBit(mlx.optimizers.Adam):
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
        if not is_stored_in_8_bits(state):
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
        updated, m, m_scale, v, v_scale = (mx.concatenate(list(pieces)) for pieces in zip(*done, strict=True))
        state |= {"m": m.reshape(parameter.shape), "v": v.reshape(parameter.shape)}
        state |= {"m_scale": m_scale, "v_scale": v_scale}
        return updated.reshape(parameter.shape)

    def _piece(self, part: dict[str, mx.array], scales: dict[str, mx.array]) -> list[mx.array]:
        """Return the updated numbers, and the codes and scales of both moments."""
        moments = {name: dequantized(part[name], scales[name], signed=name == "m") for name in ("m", "v")}
        gradient, parameter = part["gradient"].astype(mx.float32), part["parameter"]
        updated = super().apply_single(gradient, parameter.astype(mx.float32), moments).astype(parameter.dtype)
        return [updated, *quantized(moments["m"], signed=True), *quantized(moments["v"], signed=False)]


class Adam8bit(EightBit):
    """Adam with moments in 8 bits."""


class AdamW8bit(EightBit, mlx.optimizers.AdamW):
    """AdamW with moments in 8 bits."""
