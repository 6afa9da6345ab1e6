"""The workloads of all passes with a gradient, which the self-test compares with float64 at the sizes of a model."""

from __future__ import annotations

from dataclasses import replace

from ..operator.kernel_operator import KernelWorkload
from . import conv, gating, heads, norms, passes, silu


def workloads(quick: bool) -> list[KernelWorkload]:
    """Return each pass in fp32 and in bf16; `quick` makes the arrays small."""
    return [workload for module in (silu, norms, heads, conv, gating) for workload in module.workloads(quick)]


OPERATOR = replace(passes.OPERATOR, workloads=workloads)
