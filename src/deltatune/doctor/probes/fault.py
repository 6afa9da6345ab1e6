"""What a probe found."""

from __future__ import annotations

from dataclasses import dataclass

ABSENT, AVOIDED, PRESENT, NOT_RUN = "absent", "avoided", "present", "not run"

# fp32 products against fp32 products of another order, over the largest element; TF32 where the user allows it.
BOUND, TF32_BOUND = 1e-5, 2.0**-8


@dataclass(frozen=True)
class Fault:
    """A fault by name. status: absent; avoided (deltatune goes another way); present (this would train wrong); not run.

    `error`: the largest error over the largest element, where one was measured; inf where that is no number.
    """

    name: str
    status: str
    detail: str
    error: float | None = None

    @property
    def wrong(self) -> bool:
        return self.status == PRESENT
