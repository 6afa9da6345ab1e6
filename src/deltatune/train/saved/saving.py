"""Saves and restores what changes during a run, and can return to the state after the last update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ...data.batches.peekable_order import PeekableOrder
from ...errors import UserError
from ...lora import pissa
from ...machine import blas
from ...ops.trial.rankings import Rankings
from ..distributed import World
from ..reports.log import Metrics
from ..step import BeforeUpdate, Step, Sums
from ..updates.optimizer import restore
from . import state
from .outputs import Outputs


class _Start(NamedTuple):
    """The start of an accumulation: the progress, and the sums of every rank if the run was resumed inside one."""

    progress: state.Progress
    arrays: dict[str, mx.array]


class Saving:
    """Saves and restores a run.

    Args:
        step: The step: the trainable parameters of its model and the state of its optimizer are saved.
        progress: The progress of the run, which is saved and restored in place.
        order: The training batches, whose position in the data is saved.
        outputs: The files of the run.
        world: The ranks of the run; rank 0 writes.
        identity: What a continuation must share (state.fingerprint).
        chosen: The implementations that the run has chosen.

    Attributes:
        progress: The argument.
        sums: This rank's sums since the last update.
        saved: The iteration after which the state was last saved; -1 if it never was.
        updating: Whether an update is being made, so that the parameters may be partly updated.
        before: What that update replaces, where it can be undone.
        writing: Whether files are being written, which may take long.
        metrics: The metrics of the run, on rank 0.
        before_writing: Is called before each save.
        after: Is called on rank 0 after each save.
    """

    def __init__(
        self,
        step: Step,
        progress: state.Progress,
        order: PeekableOrder,
        outputs: Outputs,
        world: World,
        identity: dict[str, Any],
        chosen: Rankings,
    ):
        self._step, self.progress, self._order = step, progress, order
        self._outputs, self._world, self._identity, self._chosen = outputs, world, identity, chosen
        self.sums = self._no_sums()
        self.saved, self.updating, self.writing = -1, False, False
        self.before: BeforeUpdate | None = None
        self.metrics: Metrics | None = None
        self.before_writing: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        # Whether the state file that the next save replaces is undamaged.
        self._sound = True
        # It is None right after an update, and before the first accumulation begins.
        self._start: _Start | None = None

    def _no_sums(self) -> Sums:
        """Return the sums at the start of an accumulation."""
        return Sums(self._step.zeros(), mx.array(0.0), mx.array(0.0))

    def start_window(self) -> None:
        """Reset the accumulated sums, after every update."""
        self.sums = self._no_sums()
        self.progress.micro_batches = 0
        self._start, self.updating, self.before = None, False, None

    def note_start(self) -> None:
        """Remember the progress if an accumulation begins here."""
        if self.progress.micro_batches == 0:
            self._start = _Start(dataclasses.replace(self.progress, order=self._order.state()), {})

    def save(self, finished: bool = False) -> None:
        """Write the weights, then the state. Every rank must call it, and rank 0 writes.

        Raises:
            UserError: On every rank, if rank 0 could not write.
        """
        progress, world = self.progress, self._world
        progress.finished = finished
        progress.order = self._order.state()
        sums: dict[str, mx.array] = {}
        if progress.micro_batches:
            packed = state.pack("window", self._parted(self.sums)._asdict())
            sums = {key: world.gather(leaf) for key, leaf in packed.items()}
        problem: UserError | None = None
        try:
            self._write(sums)
        except UserError as error:
            problem = error
        if world.sum_numbers(float(problem is not None))[0]:
            raise problem or UserError("rank 0 could not save; its message says why.")

    def save_best(self, loss: float) -> None:
        """Write the weights once more, as the best so far. Every rank must call it, and rank 0 writes.

        Raises:
            UserError: On every rank, if rank 0 could not write.
        """
        outputs, at = self._outputs, self.progress.iteration

        def save() -> None:
            with self._files():
                outputs.save_best(at, loss)

        self._world.do_on_main(save, "save the best weights")

    @contextmanager
    def _files(self) -> Iterator[None]:
        """Say within the context that files are being written."""
        self.writing = True
        try:
            yield
        finally:
            self.writing = False

    def save_last_update(self) -> None:
        """Return to the state after the last update and save it on rank 0, unless all iterations are saved already.

        No rank waits for another.

        Raises:
            RuntimeError: If an update is being made that cannot be undone: parameters and optimizer may then not fit
                together.
            UserError: If the file system refuses.
        """
        if self.before is not None:
            self._step.undo(self.before)
        elif self.updating:
            raise RuntimeError("an update was being made; the state that was saved before it is still there")
        if self.saved == self.progress.iteration:
            # The file may hold the sums of an accumulation, too, which the last update has not.
            return
        if self._start is not None:
            # The order itself stays where it is: the run ends here, and a stream might have to read its rows again.
            self.progress.become(self._start.progress)
            if self.metrics is not None:
                self.metrics.cut(self.progress.metrics_bytes)
        else:
            self.progress.order = self._order.state()
        self._write(self._start.arrays if self._start is not None else {})

    def restore(self) -> list[str]:
        """Restore the run from its state file, or from the one before it if that is damaged; return lines to print.

        Every rank must call it, and all take the same file.

        Raises:
            UserError: If both files are damaged, or if the one taken belongs to another run.
        """
        path, lines = self._choose()
        arrays, progress = state.load(path, self._identity)
        threads = progress.blas_threads
        if threads and blas.use_threads(threads, "as in the run that is continued"):
            lines.append(f"BLAS: {blas.status().threads}.")
        pissa.start_at(self._step.model, state.unpack("start", pissa.starts(self._step.model), arrays, path))
        self._step.model.update(state.unpack("trainable", self._step.model.trainable_parameters(), arrays, path))
        bundles, moments = self._step.bundles, self._step.optimizer.state
        parted = state.unpack("optimizer", bundles.part_state(moments), arrays, path)
        restore(self._step.optimizer, bundles.join_state(parted, moments))
        self._order.restore(progress.order)
        self.progress.become(progress)
        self.saved = progress.iteration
        self._chosen.continue_with(progress.implementations)
        if progress.micro_batches:
            window = {key: leaf for key, leaf in arrays.items() if key.startswith("window/")}
            mine = {key: self._share(leaf) for key, leaf in window.items()}
            sums = Sums(**state.unpack("window", self._parted(self.sums)._asdict(), mine, path))
            self.sums = sums if sums.gradients is None else sums._replace(gradients=bundles.join(sums.gradients))
            ours = window if self._world.main else {}
            self._start = _Start(dataclasses.replace(progress), ours)
        # Frozen weights may stay on the disk, and nothing here has changed them.
        trained = self._step.model.trainable_parameters()
        mx.eval(trained, pissa.starts(self._step.model), self._step.optimizer.state, self.sums)
        return lines

    def _choose(self) -> tuple[Path, list[str]]:
        """Return the state file to restore, undamaged on every rank, and lines that say why it is not the last one."""
        last = self._outputs.state
        problems: list[str] = []
        for path in (last, state.previous_path(last)):
            problem = state.damage(path)
            if not self._world.sum_numbers(float(problem is not None))[0]:
                self._sound = path == last
                return path, [f"{problem}: resuming from the state before it, {path}." for problem in problems]
            problems.append(problem or f"{path} is damaged or missing on another machine")
        raise UserError(
            f"--resume: {', and '.join(problems)}. Start anew without --resume; --resume-adapter-file continues from "
            f"the adapters in {self._outputs.directory} as a new run."
        )

    def _share(self, sums: mx.array) -> mx.array:
        """Return this rank's part of the saved sums. If the number of ranks has changed, rank 0 takes all of them."""
        if len(sums) == self._world.size:
            return sums[self._world.rank]
        return sums.sum(axis=0) if self._world.main else mx.zeros_like(sums[0])

    def _write(self, sums: dict[str, mx.array]) -> None:
        self.before_writing()
        threads = blas.status().threads
        self.progress.blas_threads = threads.number if threads else 0
        self.progress.ranks = self._world.size
        self.progress.implementations = dict(self._chosen.names)
        if self._world.main:
            self._step.settle()
            arrays = state.pack("trainable", self._step.model.trainable_parameters())
            arrays |= state.pack("start", pissa.starts(self._step.model))
            moments = self._step.bundles.part_state(self._step.optimizer.state)
            arrays |= state.pack("optimizer", moments) | sums
            with self._files():
                self._outputs.save_weights(self.progress.iteration)
                if self.metrics is not None:
                    self.metrics.sync()
                state.save(self._outputs.state, arrays, self.progress, self._identity, sound=self._sound)
            self._sound = True
        self.saved = self.progress.iteration
        if self._world.main:
            self.after()

    def _parted(self, sums: Sums) -> Sums:
        """Return the sums with each gradient at the path of its parameter, as they are saved."""
        return sums if sums.gradients is None else sums._replace(gradients=self._step.bundles.part(sums.gradients))
