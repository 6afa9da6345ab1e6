"""Compares implementations of operators, and kernels in place of MLX's operations, with float64 at models' sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mlx.core as mx

from ..ops import operators
from ..ops.kernels.launch import Device, Launch
from ..ops.operator import candidates
from ..ops.operator.kernel_operator import KernelOperator, KernelWorkload
from ..ops.operator.operator import Operator, OperatorWorkload
from .outcome import FAILED, Check, Outcome, not_run, tried

_NAMES = {mx.float32: "fp32", mx.bfloat16: "bf16"}


def checks(operator: Operator, quick: bool) -> Iterator[Check]:
    """One check for each implementation and workload; the exact results of a workload are computed once."""
    for workload in operator.workloads(quick):
        for name in (operator.last, *operator.fast):
            yield Check(f"{operator.title}, {name}: {workload.name}", partial(compare, operator, name, workload))


def compare(operator: Operator, name: str, workload: OperatorWorkload) -> Outcome:
    """Compare an implementation with float64; one that has a trial must pass it first, as before its first use."""
    if name != operator.last:
        if not operator.tries:
            return not_run("it is for GPUs, and MLX computes on the CPU here")
        if name not in operator.order()[0]:
            return not_run("it serves nothing here")
    candidate = operator.candidates[name](workload.call())
    if isinstance(candidate, str):
        return not_run(f"it does not cover this: {candidate}")
    if candidate.checked is not None and not candidate.trusted:
        verdict = candidates.verdict_anew(operator, name, candidate)
        if not verdict.passed:
            # deltatune cannot repair MLX's own operator, and does not use it where it fails its trial.
            return not_run(str(verdict)) if name == "native" else Outcome(FAILED, str(verdict))
    return tried(workload.case(name), candidate.function)


def kernel_checks(quick: bool) -> Iterator[Check]:
    """One check for each workload of each operator."""
    for operator in operators.KERNELS:
        for workload in operator.workloads(quick):
            name = f"{operator.name}: {workload.name}, {_NAMES[workload.dtype]}"
            yield Check(name, partial(compare_kernels, operator, workload))


def compare_kernels(operator: KernelOperator, workload: KernelWorkload, device: Device | None = None) -> Outcome:
    """Compare outputs and gradients with float64 on the CPU; `device` runs launches in the place of a GPU."""
    if device is None and not operator.is_for_here:
        return not_run(f"these kernels are for {' and '.join(operator.devices)}; {operator.instead} serve here")
    return tried(workload.case(), device or Launch.run)
