"""The result of a probe, and the bounds on errors that the probes share."""

from __future__ import annotations

from dataclasses import dataclass

ABSENT, AVOIDED, PRESENT, NOT_RUN = "absent", "avoided", "present", "not run"

# Errors of fp32 products, relative to the largest element; the second where the user allows products in TF32.
BOUND, TF32_BOUND = 1e-5, 2.0**-8


@dataclass(frozen=True)
class Fault:
    """A known fault, and whether this machine has it.

    Args:
        name: The fault's name.
        status: `absent`; `avoided`, where deltatune computes another way; `present`, where training would be wrong; or
            `not run`.
        detail: The finding, in words.
        error: The largest error relative to the largest element, inf where a result was not finite; None where
            nothing was measured.
    """

    name: str
    status: str
    detail: str
    error: float | None = None

    @property
    def wrong(self) -> bool:
        return self.status == PRESENT
