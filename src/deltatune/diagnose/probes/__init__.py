"""Known faults of what deltatune stands on, each looked for on this machine rather than looked up by version."""

from __future__ import annotations

from . import one_row, ragged_gather, rotary, scatter_add, sorted_gather
from .fault import Fault

__all__ = ["Fault", "faults"]


def faults() -> list[Fault]:
    """What every probe found here, in the order in which a training meets them."""
    return [
        one_row.find(),
        scatter_add.find(),
        sorted_gather.find_forward(),
        sorted_gather.find_gradient(),
        ragged_gather.find(),
        rotary.find(),
    ]
