"""The update of Adam and AdamW, as one kernel over a parameter and its moments in the place of fifteen operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.optimizers

from ...machine import backend
from .. import trial
from ..kernels.launch import Arrays, Outputs, numbers
from .pass_launch import Execute, Pass

# The largest allowed difference over the largest element: MLX rounds each of fifteen results, the kernel fewer.
_BOUND = 1e-6


@dataclass(frozen=True)
class AdamStep:
    """The numbers that all parameters of an optimizer step share, for adam_step in kernels/passes/pointwise.h."""

    # [5] fp32, the same in every step: beta1, 1 - beta1, beta2, 1 - beta2, eps.
    fixed: mx.array
    # [5] fp32: the rate, the factor of sqrt(v), the factor that weight decay leaves, the gradients' factor, `healthy`.
    moving: mx.array
    execute: Execute = Pass.run

    @staticmethod
    def of(optimizer: mlx.optimizers.Optimizer, scale: mx.array | None, healthy: mx.array) -> AdamStep | None:
        """Make the numbers for the step that an optimizer has begun.

        Args:
            optimizer: its learning rate and step number are those of the step.
            scale: a factor of the gradients, [] fp32, or None.
            healthy: [] bool; where it is False, parameters and moments stay as they are.

        Returns:
            None for other optimizers than MLX's Adam and AdamW, and where the kernel is not to be used.
        """
        kinds = (mlx.optimizers.Adam, mlx.optimizers.AdamW)
        if backend.device() != "cuda" or type(optimizer) not in kinds or not _passes_trial():
            return None
        return _step(optimizer, scale, healthy, Pass.run)

    def __call__(self, parameter: mx.array, gradient: mx.array, m: mx.array, v: mx.array) -> list[mx.array]:
        """Return the new parameter, m and v, for fp32 arrays of one shape."""
        shape = parameter.shape
        inputs: Arrays = {"fixed": self.fixed, "moving": self.moving}
        given = {"parameter": parameter, "gradient": gradient, "m": m, "v": v}
        inputs |= {name: array.reshape(-1) for name, array in given.items()}
        outputs: Outputs = dict.fromkeys(("new_parameter", "new_m", "new_v"), ((parameter.size,), mx.float32))
        arguments = ("(long)parameter_shape[0]", *inputs, *outputs)
        updated = self.execute(Pass("adam_step", inputs, outputs, arguments, parameter.size))
        return [array.reshape(shape) for array in updated]


def _step(optimizer: Any, scale: mx.array | None, healthy: mx.array, execute: Execute) -> AdamStep:
    b1, b2 = optimizer.betas
    rate, bias, one = optimizer.learning_rate.astype(mx.float32), mx.array(1.0), mx.array(1.0)
    decayed = one
    if isinstance(optimizer, mlx.optimizers.AdamW):
        decayed = 1 - rate * optimizer.weight_decay
    if optimizer.bias_correction:
        rate, bias = rate / (1 - b1**optimizer.step), mx.rsqrt(1 - b2**optimizer.step)
    moving = [rate, bias, decayed, one if scale is None else scale, healthy]
    fixed = numbers(b1, 1 - b1, b2, 1 - b2, optimizer.eps)
    return AdamStep(fixed, mx.stack([number.astype(mx.float32) for number in moving]), execute)


@cache
def _passes_trial(execute: Execute = Pass.run) -> bool:
    def difference() -> float:
        shape = (3, 131)
        parameter, gradient, m, v = trial.random_arrays([(shape, mx.float32)] * 4)
        found, expected = [], []
        for corrected in (True, False):
            optimizer = mlx.optimizers.AdamW(0.1, bias_correction=corrected)
            optimizer.state["step"] = mx.array(3)
            state = {"m": m, "v": v.square()}
            for scale, healthy in ((mx.array(0.5), True), (mx.array(0.5), False)):
                step = _step(optimizer, scale, mx.array(healthy), execute)
                found += step(parameter, gradient, **state)
                new = dict(state)
                moved = optimizer.apply_single(gradient * scale, parameter, new)
                expected += [moved, new["m"], new["v"]] if healthy else [parameter, *state.values()]
        return trial.largest_error(found, expected)

    return trial.passes("Adam's step", difference, _BOUND)
