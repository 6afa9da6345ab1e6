"""The arrays of a batch of sampled answers that their loss reads beside the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """The sampled answers of a batch of B rows of T positions. Numbers of other positions are 0.

    Args:
        advantages: float32 [B, T], the advantage of the answer that each target is part of.
        sampled: float32 [B, T], the log-probability of each target when it was sampled.
        total: float32 [], the number by which the batch's sum of losses is divided; it counts dropped answers, too.
        figures: float32 [2, F], sums of figures, and of how many numbers each is the sum.
        old: float32 [B, T], the log-probability of each target in training before the first update; None for that of
            the present forward pass.
        reference: float32 [B, T], the log-probability under the reference model; None without one.
    """

    advantages: np.ndarray
    sampled: np.ndarray
    total: np.ndarray
    figures: np.ndarray
    old: np.ndarray | None = None
    reference: np.ndarray | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of a step, by name."""
        named = {name: getattr(self, name) for name in self.__slots__}
        return {name: array for name, array in named.items() if array is not None}
