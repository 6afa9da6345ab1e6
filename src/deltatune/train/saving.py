"""Saves and restores a run: its training state, its weights, its report, and its choice of implementations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import UserError
from ..machine import blas
from ..ops.operator import rankings
from ..ops.operator.rankings import Rankings
from ..options.config import TrainConfig
from .distributed import World
from .reports.reporting import Reporting
from .saved import state
from .saved.outputs import Outputs
from .training_state import TrainingState


@dataclass(eq=False)
class Saving:
    """Saves and restores a run: its state in place, its metrics with each save, its report after it. Rank 0 writes.

    `identity` are the options and facts that a continuation must share (state.fingerprint). `saved` is the iteration
    after which the state was last saved, -1 if it never was; `writing` says whether files are being written.
    """

    training: TrainingState
    outputs: Outputs
    reporting: Reporting
    world: World
    identity: dict[str, Any]
    chosen: Rankings

    def __post_init__(self) -> None:
        self.saved = -1
        self.writing = False
        # Whether the state file that the next save replaces is undamaged.
        self._sound = True

    def save(self, *, finished: bool = False, stopping: bool = False) -> None:
        """Write the weights, then the state, then the report; the last report of a `finished` run is left to the run.

        Every rank must call it, and raises a UserError if rank 0 could not write. A run that is `stopping` ends here
        before it is complete.
        """
        progress = self.training.progress
        progress.finished = finished
        window = self.training.window()
        self.world.do_on_main(partial(self._write, window, stopping=stopping), "save")
        self.saved = progress.iteration

    def save_best(self, loss: float) -> None:
        """Write the weights once more, as the best so far; every rank must call it, as save()."""
        at = self.training.progress.iteration

        def save() -> None:
            with self._files():
                self.outputs.save_best(at, loss)

        self.world.do_on_main(save, "save the best weights")

    @contextmanager
    def _files(self) -> Iterator[None]:
        self.writing = True
        try:
            yield
        finally:
            self.writing = False

    def save_last_update(self) -> None:
        """Return to the state after the last update and save it on rank 0, unless all iterations are saved already.

        No rank waits for another. While an update is being made, a RuntimeError is raised.
        """
        self.training.check_complete()
        if self.saved == self.training.progress.iteration:
            # The file may hold the sums of an accumulation window, too, which the last update has not.
            return
        sums = self.training.return_to_start()
        self.reporting.cut(self.training.progress)
        if self.world.main:
            self._write(sums, stopping=True)
        self.saved = self.training.progress.iteration

    def restore(self) -> list[str]:
        """Restore the run from its state file, or from the one before it if that is damaged; return lines to print.

        Every rank must call it, and all take the same file. Two damaged files, or one of another run, are a UserError.
        """
        path, lines = self._choose()
        arrays, progress = state.load(path, self.identity)
        threads = progress.blas_threads
        if threads and blas.use_threads(threads, "as in the run that is continued"):
            lines.append(f"BLAS: {blas.status().threads}.")
        self.training.restore(arrays, progress, path)
        self.saved = progress.iteration
        self.chosen.continue_with(progress.implementations)
        return lines

    def _choose(self) -> tuple[Path, list[str]]:
        """Return the state file to restore, undamaged on every rank, and lines that say why it is not the last one."""
        last = self.outputs.state
        problems: list[str] = []
        for path in (last, state.previous_path(last)):
            problem = state.damage(path)
            if not self.world.sum_numbers(float(problem is not None))[0]:
                self._sound = path == last
                return path, [f"{problem}: resuming from the state before it, {path}." for problem in problems]
            problems.append(problem or f"{path} is damaged or missing on another machine")
        raise UserError(
            f"--resume: {', and '.join(problems)}. Start anew without --resume; --resume-adapter-file continues from "
            f"the adapters in {self.outputs.directory} as a new run."
        )

    def _write(self, sums: dict[str, mx.array], *, stopping: bool) -> None:
        progress = self.training.progress
        threads = blas.status().threads
        progress.blas_threads = threads.number if threads else 0
        progress.ranks = self.world.size
        progress.implementations = dict(self.chosen.names)
        arrays = self.training.arrays() | sums
        with self._files():
            self.outputs.save_weights(progress.iteration)
            self.reporting.sync()
            state.save(self.outputs.state, arrays, progress, self.identity, sound=self._sound)
        self._sound = True
        self.saved = progress.iteration
        if not progress.finished:
            text = "stopped" if stopping else "still training"
            self.reporting.write(progress, text, running=not stopping)


@contextmanager
def kept_choices(config: TrainConfig) -> Iterator[Rankings]:
    """Within the context, a class of calls keeps its implementation: that of the continued run, if there is one."""
    with rankings.of_run() as chosen:
        saved = state.peek(state.state_path(config.adapter_path)) if config.resume else None
        if saved is not None:
            chosen.continue_with(saved.implementations)
        yield chosen


def agree_on_choices(chosen: Rankings, world: World) -> None:
    """Give every rank the choices of rank 0. Waits for every rank.

    Ranks meet later classes at different moments, so they cannot agree on times for those: there the order of
    preference decides.
    """
    if world.size == 1:
        return
    main = world.gather_texts(json.dumps(chosen.names) if world.main else "")[0]
    if not world.main:
        chosen.names.clear()
        chosen.continue_with(json.loads(main))
    chosen.by_time = False
