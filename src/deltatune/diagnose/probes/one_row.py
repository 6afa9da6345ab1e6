"""Products of one row that keep a NaN from the memory they are written into (mlx issue 3200)."""

from __future__ import annotations

from ... import backend, one_row
from .fault import ABSENT, AVOIDED, NOT_RUN, PRESENT, Fault

NAME = "NaN in products of one row (BLAS)"


def find() -> Fault:
    """Of the CPU's BLAS, whatever device MLX computes on."""
    found = one_row.probe()
    if found.library is None:
        return Fault(NAME, NOT_RUN, str(found))
    if not found.wrong:
        return Fault(NAME, ABSENT, str(found))
    if not found.mendable:
        return Fault(NAME, PRESENT, f"{found}; two rows are no way around it")
    if backend.device() != "cpu":
        return Fault(NAME, AVOIDED, f"{found}; MLX computes on the GPU here")
    return Fault(NAME, AVOIDED, f"{found}; deltatune computes them as two rows")
