"""Tells of a run while it trains: on the screen, in metrics.jsonl, to services, and in its report."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...errors import UserError, reason
from ...options.config import TrainConfig
from ..preferences.objectives import means
from ..progress import Progress, Result
from ..saved.outputs import Outputs
from . import log
from .report import ReportTable, RunDescription, write_report
from .screen import Screen, duration

# The time that is left is estimated from so many iterations.
_RECENT = 50
# The largest part of the run's time that is spent on writing its report, which grows with the run.
_REPORTS_SHARE = 0.02


@dataclass(eq=False)
class Reporting:
    """Tells of a run; only rank 0, the main one, writes files and sends to services.

    `on_host` are the bytes that MLX counts as its own, but are outside the device's memory; `thumbnails` the images of
    each sample prompt as data URIs. `about`, the description of the run in its report by name, is empty before open().
    """

    config: TrainConfig
    outputs: Outputs
    screen: Screen
    main: bool
    on_host: int = 0
    thumbnails: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        self.about: dict[str, str] = {}
        self._tables: Sequence[ReportTable] = ()
        self.metrics: log.Metrics | None = None
        self._services: list[log.Service] = []
        self._window: deque[tuple[float, int]] = deque()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        # Whether the report says that the run goes on, and when it may be written anew.
        self._running = False
        self._next_report = 0.0

    def open(self, progress: Progress, about: dict[str, str], tables: Sequence[ReportTable]) -> None:
        """Open the metrics and the services, and write the first report, with `tables` besides those that all have.

        The progress says how much of the metrics is kept.
        """
        self.about = about
        self._tables = tables
        if not self.main:
            return
        config = self.config
        outputs = self.outputs
        self.metrics = log.Metrics(outputs.metrics, progress.metrics_bytes)
        options = dataclasses.asdict(config)
        self._services = log.open_services(config.report_to, outputs.directory, config.project_name, options)
        self.write(progress, "just begun", running=True)

    def sync(self) -> None:
        """Bring the metrics to the disk, on rank 0."""
        if self.metrics is not None:
            self.metrics.sync()

    def cut(self, progress: Progress) -> None:
        """Remove the metrics behind those that belong to a progress to which the run has returned, on rank 0."""
        if self.metrics is not None:
            self.metrics.cut(progress.metrics_bytes)

    def close(self, progress: Progress, cause: BaseException | None) -> None:
        """Close the files and services from open(), each whether or not another one fails to close, and remove the bar.

        A report of a running run is written once more, with the error that ended the run, if one did.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._end, progress, cause)
            for opened in (self.metrics, *self._services):
                if opened is not None:
                    stack.callback(opened.close)
            self.screen.stop()

    @property
    def peak_memory(self) -> float:
        """The most memory that MLX has held on the device, in GB."""
        return (mx.get_peak_memory() - self.on_host) / 1e9

    @property
    def last_seconds(self) -> float:
        """The seconds of the last iteration; infinity before the first."""
        return self._recent[-1] if self._recent else math.inf

    def iteration(self, progress: Progress, seconds: float, tokens: int, loss: float | None) -> None:
        """Count an iteration of so many seconds and tokens, with the loss of its batch if that has a target."""
        self._window.append((seconds, tokens))
        self._recent.append(seconds)
        self.screen.advance(progress.iteration, loss, self._left(progress))

    def _left(self, progress: Progress) -> float:
        """Return the seconds that the iterations which are left will take, if they are as quick as the last ones."""
        return sum(self._recent) / max(len(self._recent), 1) * (self.config.iters - progress.iteration)

    def training(self, progress: Progress, rate: float, figures: Sequence[str]) -> dict[str, Any]:
        """Report the iterations since the last report, and return the record of it.

        The sums of the progress are taken and begin anew; `figures` names those that a step reports besides its loss.
        """
        seconds = sum(s for s, _ in self._window) or 1e-9
        loss = progress.window_loss / progress.window_weight if progress.window_weight else math.nan
        record = {
            "iteration": progress.iteration,
            "train_loss": loss,
            "grad_norm": progress.grad_norm,
            "learning_rate": rate,
            "iterations_per_second": len(self._window) / seconds,
            "tokens_per_second": sum(t for _, t in self._window) / seconds,
            "trained_tokens": int(progress.trained_tokens),
            "peak_memory": self.peak_memory,
        } | means(figures, progress.window_figures)
        progress.start_report()
        self._window.clear()
        progress.train_loss = loss
        self.report(progress, record, total=self.config.iters, left=self._left(progress))
        return record

    def samples(self, progress: Progress, answers: list[dict[str, str]]) -> None:
        """Report answers, each with its prompt; rank 0 has them."""
        self.report(progress, {"iteration": progress.iteration, log.SAMPLES: answers})

    def report(self, progress: Progress, record: dict[str, Any], **how: Any) -> None:
        """Keep a record, then show it as Screen.report() does: whoever has seen it there finds it in the files."""
        if self.metrics is not None:
            progress.metrics_bytes = self.metrics.write(record)
        log.send(record, self._services)
        # The report of a run that goes on is written anew, unless that would take too much of the run's time.
        if self._running and time.perf_counter() >= self._next_report:
            self.write(progress, "still training", running=True)
        self.screen.report(record, **how)

    def write(self, progress: Progress, state: str, *, running: bool, result: Result | None = None) -> None:
        """Write the report on rank 0, with `state`, how the run stands in words, and its result where it has ended."""
        if not self.main:
            return
        self._running = running
        started = time.perf_counter()
        figures = dataclasses.asdict(result or Result.of(progress, self.peak_memory, stopped_early=False))
        outputs = self.outputs
        left = {"time left": duration(self._left(progress)) if self._recent else "–"}
        commands = [] if running or not progress.iteration else outputs.commands()
        description = RunDescription(
            self.about,
            self._tables,
            headline=left if running else {},
            state=state,
            running=running,
            thumbnails=self.thumbnails,
            commands=commands,
        )
        for problem in write_report(outputs.report, outputs.metrics, self.config, figures, description):
            self.screen.say(f"Report: {problem}")
        ended = time.perf_counter()
        self._next_report = ended + (ended - started) / _REPORTS_SHARE

    def _end(self, progress: Progress, cause: BaseException | None) -> None:
        """Write why the run has stopped; the error that stopped it is more important than one of the report."""
        if not self._running and cause is None:
            return
        try:
            self.write(progress, "stopped" if cause is None else f"stopped: {reason(cause)}", running=False)
        except UserError as error:
            self.screen.say(f"Report: {error}")
