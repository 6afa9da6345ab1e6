"""Holds the figures of one iteration, and the final figures of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..progress import Progress


class Advance(NamedTuple):
    """The figures of one iteration.

    Attributes:
        sums: Over all ranks: losses, weights, tokens, ranks that were asked to stop, and a preference loss's figures.
        norm: The gradients' Euclidean norm before clipping; None if the iteration made no update.
    """

    sums: tuple[float, ...]
    norm: float | None


@dataclass(frozen=True)
class Result:
    """The final figures of a run.

    Attributes:
        iterations: The number of iterations that are complete.
        train_loss: The training loss per token of the last report.
        val_loss: The validation loss per token of the last evaluation.
        best_val_loss: The lowest validation loss per token.
        best_iteration: The iteration after which it was measured; None if no evaluation was made.
        seconds: The time spent training, over all parts of a resumed run.
        tokens_per_second: The training speed over that time.
        peak_memory: The peak memory of this process, in GB.
        stopped_early: Whether the validation loss had stopped improving.
    """

    iterations: int
    train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    seconds: float
    tokens_per_second: float
    peak_memory: float
    stopped_early: bool
    best_iteration: int | None = None

    @classmethod
    def of(cls, progress: Progress, peak_memory: float, stopped_early: bool) -> Result:
        """Take the figures from `progress`; the peak of memory is in GB."""
        return cls(
            iterations=progress.iteration,
            train_loss=progress.train_loss,
            val_loss=progress.val_loss,
            best_val_loss=progress.best_loss,
            seconds=progress.seconds,
            tokens_per_second=progress.trained_tokens / progress.seconds if progress.seconds else 0.0,
            peak_memory=peak_memory,
            stopped_early=stopped_early,
            best_iteration=progress.best_iteration if progress.best_iteration >= 0 else None,
        )
