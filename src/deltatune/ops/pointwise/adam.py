"""The update of Adam and AdamW, as one kernel over a parameter and its moments in the place of fifteen operations.

It computes in fp32, whatever the dtypes of the arrays, and rounds the new arrays once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
import mlx.optimizers

from ..kernels.launch import Arrays, Device, Outputs, numbers
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator, KernelWorkload, in_each_dtype
from ..operator.measure import ROUNDING, in_float64, random_arrays
from .passes import by_lane, size_of

# How many elements one lane holds.
_LANE = 8
# The largest difference over the largest element that a trial allows from MLX's operations in fp32, which round each of
# fifteen results where the kernel rounds fewer; and half of the last place of a 16-bit dtype, to which it rounds once.
_BOUND_IN_FP32 = 1e-6
BOUNDS = {getattr(mx, dtype): _BOUND_IN_FP32 + rounding for dtype, rounding in ROUNDING.items()}


@dataclass(frozen=True)
class AdamStep:
    """The numbers that all parameters of an optimizer step share, for adam_step in kernels/passes/pointwise.h."""

    # [5] fp32, the same in every step: beta1, 1 - beta1, beta2, 1 - beta2, eps.
    fixed: mx.array
    # [5] fp32: the rate, the factor of sqrt(v), the factor that weight decay leaves, the gradients' factor, `healthy`.
    moving: mx.array
    # The arrays that a step replaces, by their names in an optimizer's state.
    moments: ClassVar[tuple[str, ...]] = ("m", "v")

    @staticmethod
    def of(
        optimizer: mlx.optimizers.Optimizer,
        scale: mx.array | None,
        healthy: mx.array,
        others: tuple[type, ...] = (),
    ) -> AdamStep | None:
        """Make the numbers for the step that an optimizer has begun, with a factor of the gradients [] fp32, or None.

        Where `healthy` [] bool is False, parameters and moments stay as they are. The result is None on other devices
        than NVIDIA's GPUs and for other optimizers than MLX's Adam and AdamW and `others`, classes with the arithmetic
        of Adam, or of AdamW where they derive from it.
        """
        kinds = (mlx.optimizers.Adam, mlx.optimizers.AdamW, *others)
        if not OPERATOR.is_for_here or type(optimizer) not in kinds:
            return None
        return AdamStep.begun(optimizer, scale, healthy)

    @staticmethod
    def begun(optimizer: Any, scale: mx.array | None, healthy: mx.array) -> AdamStep:
        """Make the numbers for an optimizer with the arithmetic of Adam or AdamW, with the arguments of `of`."""
        b1, b2 = optimizer.betas
        rate, bias, one = optimizer.learning_rate.astype(mx.float32), mx.array(1.0), mx.array(1.0)
        decayed = one
        if isinstance(optimizer, mlx.optimizers.AdamW):
            decayed = 1 - rate * optimizer.weight_decay
        if optimizer.bias_correction:
            rate, bias = rate / (1 - b1**optimizer.step), mx.rsqrt(1 - b2**optimizer.step)
        moving = [rate, bias, decayed, one if scale is None else scale, healthy]
        fixed = numbers(b1, 1 - b1, b2, 1 - b2, optimizer.eps)
        return AdamStep(fixed, mx.stack([number.astype(mx.float32) for number in moving]))

    def serves(self, parameter: mx.array, gradient: mx.array) -> bool:
        """Whether the kernel takes arrays of these dtypes, and was found right with them on this machine."""
        dtypes = parameter.dtype, gradient.dtype
        return all(dtype in BOUNDS for dtype in dtypes) and OPERATOR.serves(*dtypes)

    def __call__(self, parameter: mx.array, gradient: mx.array, m: mx.array, v: mx.array) -> list[mx.array]:
        """Return the new parameter, m and v, each in its own dtype, for floats of one shape; m and v have one dtype."""
        inputs: Arrays = {"fixed": self.fixed, "moving": self.moving, "parameter": parameter, "gradient": gradient}
        inputs |= {"m": m, "v": v}
        replaced = {"new_parameter": parameter, "new_m": m, "new_v": v}
        outputs: Outputs = {name: (array.shape, array.dtype) for name, array in replaced.items()}
        return by_lane("adam_step", inputs, outputs, (size_of("parameter", parameter),), -(-parameter.size // _LANE))()


# The steps of a trial.
TRIED = 4


def tried_steps(step: Callable[[mlx.optimizers.AdamW, bool], Sequence[mx.array]]) -> list[mx.array]:
    """Return the results of a trial's steps, of optimizers that have begun them and of which each second is made."""
    results: list[mx.array] = []
    for corrected in (True, False):
        optimizer = mlx.optimizers.AdamW(0.1, bias_correction=corrected)
        optimizer.state["step"] = mx.array(3)
        results += [*step(optimizer, True), *step(optimizer, False)]
    return results


def trial_case(dtype: mx.Dtype, gradient_dtype: mx.Dtype, rows: int = 3) -> Case[Device]:
    """Return the case of parameters and gradients of these dtypes: some steps, as MLX's optimizer makes them."""
    kinds = [((rows, 131), dtype) for dtype in (dtype, gradient_dtype, dtype, dtype)]
    parameter, gradient, m, v = random_arrays(kinds)
    arrays = (parameter, gradient, m, v.square())
    scale = mx.array(0.5)

    def step(optimizer: mlx.optimizers.AdamW, healthy: bool) -> list[mx.array]:
        return AdamStep.begun(optimizer, scale, mx.array(healthy))(*arrays)

    def plain(arrays: Sequence[mx.array], optimizer: mlx.optimizers.AdamW, healthy: bool) -> list[mx.array]:
        before, d, *moments = arrays
        new = dict(zip(("m", "v"), moments, strict=True))
        moved = optimizer.apply_single(d * scale, before, new)
        return [moved, new["m"], new["v"]] if healthy else [before, *moments]

    gradients = "" if dtype == gradient_dtype else f" with gradients of {gradient_dtype}"
    names = [f"{name} of step {i}" for i in range(TRIED) for name in ("parameter", "m", "v")]
    return Case(
        name=f"Adam's step in {dtype}{gradients}",
        results=names,
        call=by_kernels(lambda: tried_steps(step)),
        truth=lambda: in_float64(lambda arrays: tried_steps(partial(plain, arrays)), arrays),
        bound=BOUNDS[dtype],
        like=arrays,
    )


def _workloads(quick: bool) -> list[KernelWorkload]:
    return in_each_dtype("AdamW", lambda dtype: trial_case(dtype, dtype, 37 if quick else 32_000))


OPERATOR = KernelOperator("passes", trial_case, workloads=_workloads)
