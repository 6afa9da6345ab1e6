"""Holds the progress of a run: its counters, the sums since its last report, and its final figures."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ops.recomputation import Checkpoints

if TYPE_CHECKING:
    from ..models.load import Loaded


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        iteration: The iterations that are complete, each of one micro-batch.
        micro_batches: The micro-batches since the last update.
        evaluated: The iteration after which the last evaluation was made; -1 if none was.
        sampled: The iteration after which sample_prompts were last answered; -1 if they never were.
        trained_tokens: The tokens trained on, over all ranks, in `seconds` spent in iterations.
        train_loss: The loss per token of the last report.
        val_loss, best_loss: The loss per token of the last evaluation, and the lowest of all evaluations.
        best_iteration: The iteration after which the lowest was measured; -1 if no evaluation was made.
        window_loss, window_weight: The sums of losses and target weights since the last report, which updates in
            between do not end.
        window_figures: The figures of a preference loss since then: sums, and how many answers each is the sum of.
        grad_norm: The gradients' norm of the last update, before clipping.
        metrics_bytes: The length of metrics.jsonl.
        ranks: The number of ranks that saved the state.
        blas_threads: The threads of OpenBLAS, on which the last bits of products depend; 0 for another BLAS.
        checkpointed_layers: The positions of the checkpointed layers where grad_checkpoint is auto, else None. A
            layer that runs in pieces rounds otherwise, so a continuation needs the same.
        recomputed_operators: Whether auto has the other layers recompute cheap operators.
        implementations: By class of calls of an operator, the names of implementations; the first serves. They round
            differently, so a continuation needs the same.
        order: The place in the training data, as the order of the run gives it (TrainingOrder.state).
    """

    iteration: int = 0
    micro_batches: int = 0
    evaluated: int = -1
    sampled: int = -1
    trained_tokens: float = 0.0
    seconds: float = 0.0
    train_loss: float | None = None
    val_loss: float | None = None
    best_loss: float | None = None
    best_iteration: int = -1
    evaluations_without_gain: int = 0
    window_loss: float = 0.0
    window_weight: float = 0.0
    window_figures: list[float] = field(default_factory=list)
    grad_norm: float | None = None
    metrics_bytes: int = 0
    ranks: int | None = None
    finished: bool = False
    blas_threads: int = 0
    checkpointed_layers: list[int] | None = None
    recomputed_operators: bool = False
    implementations: dict[str, list[str]] = field(default_factory=dict)
    order: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Checkpoints | None:
        """The layers and operators to recompute where grad_checkpoint is auto, else None."""
        layers = self.checkpointed_layers
        return None if layers is None else Checkpoints(layers, self.recomputed_operators)

    @checkpoints.setter
    def checkpoints(self, chosen: Checkpoints | None) -> None:
        self.checkpointed_layers = None if chosen is None else list(chosen.layers)
        self.recomputed_operators = chosen is not None and chosen.operators

    def become(self, other: Progress) -> None:
        """Take every attribute of another progress, so that whoever holds this one sees it."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(other, name))

    def add(self, advance: Advance) -> None:
        """Add the sums of a micro-batch to those since the last report."""
        self.window_loss += advance.loss
        self.window_weight += advance.weight
        before = self.window_figures or [0.0] * len(advance.figures)
        # A new list, since earlier copies of the progress share the old one.
        self.window_figures = [one + other for one, other in zip(before, advance.figures, strict=True)]
        self.trained_tokens += advance.tokens

    def start_report(self) -> None:
        """Reset the sums, after a report."""
        self.window_loss = self.window_weight = 0.0
        self.window_figures = []


class Advance(NamedTuple):
    """The figures of one iteration: sums over all ranks, and the norm of an update's gradients."""

    loss: float
    weight: float
    tokens: float
    # The ranks that were asked to stop.
    asked: float
    # A preference loss's figures and the routers': sums, and how many answers each is the sum of.
    figures: list[float]
    # Euclidean, before clipping; None if the iteration made no update.
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
        stopped_early: Whether the run ended before its last iteration: the validation loss had stopped improving, or a
            callback ended it.
        report: The path of the run's report, which a notebook shows; None on ranks other than 0.
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
    report: str | None = None

    def _repr_html_(self) -> str | None:
        """Return the report as a notebook shows it, or None, for the figures as text, where there is none."""
        if self.report is None or not Path(self.report).is_file():
            return None
        page = html.escape(Path(self.report).read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'

    @classmethod
    def of(cls, progress: Progress, peak_memory: float, stopped_early: bool, report: str | None = None) -> Result:
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
            report=report,
        )


class FineTuned(NamedTuple):
    """The trained model with its tokenizer, and the final figures, which a notebook shows as the run's report."""

    loaded: Loaded
    result: Result

    def _repr_html_(self) -> str | None:
        return self.result._repr_html_()
