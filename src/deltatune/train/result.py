"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .state import Progress


@dataclass(frozen=True)
class Result:
    """How a run ended. Losses per token; seconds of training, over every part of a resumed run."""

    iterations: int
    train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    seconds: float
    tokens_per_second: float
    peak_memory: float
    stopped_early: bool

    @classmethod
    def of(cls, progress: Progress, stopped_early: bool) -> Result:
        """The figures of `progress`, and this process's peak memory."""
        return cls(
            iterations=progress.iteration,
            train_loss=progress.train_loss,
            val_loss=progress.val_loss,
            best_val_loss=progress.best_loss,
            seconds=progress.seconds,
            tokens_per_second=progress.trained_tokens / progress.seconds if progress.seconds else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            stopped_early=stopped_early,
        )
