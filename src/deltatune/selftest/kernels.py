"""Compares the kernels that take the place of MLX's operations with float64, at the sizes of a model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mlx.core as mx

from ..ops import operators
from ..ops.kernels.launch import Device, Launch
from ..ops.operator.kernel_operator import KernelOperator, KernelWorkload
from .outcome import Check, Outcome, not_run, tried

_NAMES = {mx.float32: "fp32", mx.bfloat16: "bf16"}


def checks(quick: bool) -> Iterator[Check]:
    """One check for each workload of each operator."""
    for operator in operators.KERNELS:
        for workload in operator.workloads(quick):
            name = f"{operator.name}: {workload.name}, {_NAMES[workload.dtype]}"
            yield Check(name, partial(compare, operator, workload))


def compare(operator: KernelOperator, workload: KernelWorkload, device: Device | None = None) -> Outcome:
    """Compare outputs and gradients with float64 on the CPU; `device` runs launches in the place of a GPU."""
    if device is None and not operator.is_for_here:
        return not_run(f"these kernels are for {' and '.join(operator.devices)}; {operator.instead} serve here")
    return tried(workload.case(), device or Launch.run)
