"""Probes for known faults of MLX and BLAS, which run a small case here instead of comparing versions."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import first_line
from . import one_row_blas, sorted_gather
from .fault import PRESENT, Fault

__all__ = ["Fault", "faults"]

# In the order in which a training run would meet them.
PROBES: tuple[tuple[str, Callable[[], Fault]], ...] = (
    (one_row_blas.NAME, one_row_blas.find),
    (sorted_gather.FORWARD, sorted_gather.find_forward),
    (sorted_gather.GRADIENT, sorted_gather.find_gradient),
    (sorted_gather.VIEWS, sorted_gather.find_views),
)


def faults() -> list[Fault]:
    """Run every probe. A fault counts as present where MLX cannot run the probe at all; it then has MLX's words."""
    results = []
    for name, find in PROBES:
        try:
            results.append(find())
        except RuntimeError as error:
            results.append(Fault(name, PRESENT, f"MLX cannot compute it here: {first_line(error)[:200]}"))
    return results
