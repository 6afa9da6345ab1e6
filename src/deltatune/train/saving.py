"""What a run would lose by ending: saved, restored, and put back to where the last update left it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers

from ..data import BatchOrder
from ..errors import UserError
from ..machine import blas
from . import state
from .distributed import World
from .log import Metrics
from .optimizer import restore
from .outputs import Outputs
from .step import Step, Sums


class _Start(NamedTuple):
    """What an accumulation began with: the progress, and every rank's sums where a saved state held some."""

    progress: state.Progress
    arrays: dict[str, mx.array]


class Saving:
    """The changing part of a run, and its way to the disk and back.

    Args:
        model: Its trainable parameters are saved.
        optimizer: Its state is saved.
        order: The place in the training data is saved.
        identity: What a continuation must share (state.fingerprint).

    Attributes:
        progress: Where the run stands.
        sums: This rank's sums since the last update.
        saved: The iteration after which the state was saved last, or -1.
        updating: Whether parameters may be between two updates, so that save_last_update() would save neither.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: mlx.optimizers.Optimizer,
        order: BatchOrder,
        outputs: Outputs,
        world: World,
        identity: dict[str, Any],
    ):
        self._model, self._optimizer, self._order = model, optimizer, order
        self._outputs, self._world, self._identity = outputs, world, identity
        self.progress, self.saved, self.updating = state.Progress(), -1, False
        self.metrics: Metrics | None = None
        # None while no update has ended the accumulation that it describes.
        self._start: _Start | None = None

    def begin(self, step: Step) -> None:
        """Take the step whose sums and bundles are saved, and start an accumulation."""
        self._step = step
        self.start_window()

    def start_window(self) -> None:
        """Nothing is accumulated: an update has just been made, or none yet."""
        self.sums = Sums(self._step.zeros(), mx.array(0.0), mx.array(0.0))
        self.progress.micro_batches = 0
        self._start, self.updating = None, False

    def note_start(self) -> None:
        """Remember where an accumulation begins, unless the run is inside one."""
        if self.progress.micro_batches == 0:
            self._start = _Start(dataclasses.replace(self.progress, order=self._order.state()), {})

    def save(self, finished: bool = False) -> None:
        """Write weights, then the state; every rank takes part, rank 0 writes. UserError where it cannot."""
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

    def save_last_update(self) -> None:
        """Put everything where the last update left it, and let rank 0 save that; no rank waits for another.

        RuntimeError during an update, when there is nothing whole to save. UserError where the disk refuses.
        """
        if self.updating:
            raise RuntimeError("an update was being made; what was saved before stands")
        if self._start is not None:
            self.progress = dataclasses.replace(self._start.progress)
            self._order.restore(self.progress.order)
            if self.metrics is not None:
                self.metrics.cut(self.progress.metrics_bytes)
        else:
            self.progress.order = self._order.state()
        self._write(self._start.arrays if self._start is not None else {})

    def restore(self) -> bool:
        """Continue where the state file says; returns whether the number of BLAS threads had to change for that.

        UserError where the file is of another run, or damaged.
        """
        path = self._outputs.state
        arrays, progress = state.load(path, self._identity)
        threads = progress.blas_threads
        changed = bool(threads) and blas.use_threads(threads, "as in the run that goes on here")
        self._model.update(state.unpack("trainable", self._model.trainable_parameters(), arrays, path))
        bundles, moments = self._step.bundles, self._optimizer.state
        parted = state.unpack("optimizer", bundles.part_state(moments), arrays, path)
        restore(self._optimizer, bundles.join_state(parted, moments))
        self._order.restore(progress.order)
        self.progress, self.saved = progress, progress.iteration
        if progress.micro_batches:
            window = {key: leaf for key, leaf in arrays.items() if key.startswith("window/")}
            mine = {key: self._share(leaf) for key, leaf in window.items()}
            sums = Sums(**state.unpack("window", self._parted(self.sums)._asdict(), mine, path))
            self.sums = sums if sums.gradients is None else sums._replace(gradients=bundles.join(sums.gradients))
            kept = window if self._world.main else {}
            self._start = _Start(dataclasses.replace(progress), kept)
        mx.eval(self._model.parameters(), self._optimizer.state, self.sums)
        return changed

    def _share(self, sums: mx.array) -> mx.array:
        """This rank's part of the sums of all ranks that saved. Other ranks than those leave all to rank 0."""
        if len(sums) == self._world.size:
            return sums[self._world.rank]
        return sums.sum(axis=0) if self._world.main else mx.zeros_like(sums[0])

    def _write(self, sums: dict[str, mx.array]) -> None:
        threads = blas.status().threads
        self.progress.blas_threads = threads.number if threads else 0
        self.progress.ranks = self._world.size
        if self._world.main:
            arrays = state.pack("trainable", self._model.trainable_parameters())
            moments = self._step.bundles.part_state(self._optimizer.state)
            arrays |= state.pack("optimizer", moments) | sums
            self._outputs.save_weights(self.progress.iteration)
            if self.metrics is not None:
                self.metrics.sync()
            state.save(self._outputs.state, arrays, self.progress, self._identity)
        self.saved = self.progress.iteration

    def _parted(self, sums: Sums) -> Sums:
        """With gradients by the path of their parameter, as a run keeps them."""
        return sums if sums.gradients is None else sums._replace(gradients=self._step.bundles.part(sums.gradients))
