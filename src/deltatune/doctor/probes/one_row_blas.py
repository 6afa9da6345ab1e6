"""Looks for a BLAS with products of one row that keep a NaN from their output's memory (mlx issue 3200)."""

from __future__ import annotations

from ...machine import backend, blas_fault
from ...patches.tables.one_row_products import in_force
from .fault import ABSENT, AVOIDED, NOT_RUN, PRESENT, Fault

NAME = "NaN in products of one row (BLAS)"


def find() -> Fault:
    """Probe the CPU's BLAS, whatever device MLX computes on; the fault is avoided where its patch is in force."""
    probed = blas_fault.probe()
    if probed.library is None:
        return Fault(NAME, NOT_RUN, str(probed))
    if not probed.wrong:
        return Fault(NAME, ABSENT, str(probed))
    if not probed.two_rows_work:
        return Fault(NAME, PRESENT, f"{probed}; computing one row as two does not help")
    if not backend.uses_blas():
        return Fault(NAME, AVOIDED, f"{probed}; MLX computes on the GPU here")
    if not in_force():
        return Fault(NAME, PRESENT, f"{probed}; MLX's functions could not be replaced, see the patches")
    return Fault(NAME, AVOIDED, f"{probed}; deltatune computes them as two rows")
