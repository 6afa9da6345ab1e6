"""Engines compute the micro-batches of a run, and an update where one is due.

An Engine computes each to its end before the next. An EarlyEngine starts a micro-batch before the results of the one
before have been read, on GPUs.

A GPU waits for the CPU, which builds and launches thousands of operations a step. If nothing is due between two
iterations, the second one's forward and backward pass is therefore launched while the GPU computes the first. It waits
for nothing but the first one's update, and changes neither parameters nor optimizer. If the first one fails, or the run
is asked to stop, the results of the second are dropped, and the state is saved as if it had never been started.
From the second iteration of such a row on, a thread of its own launches the work that the main thread builds.

Each rank starts early by itself, since nothing travels between ranks in a forward and backward pass. Where the losses
of routers train, their sums travel there, and several ranks start nothing early.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..data import Batch
from ..machine import backend
from ..machine.host_memory import as_numpy
from ..options.config import TrainConfig
from .distributed import World
from .ending.early_end import Ending
from .launcher import PATIENCE, Launcher
from .progress import Advance
from .step import MicroBatch, Sums
from .training_state import TrainingState
from .tree import iteration_key, leaves, number

# The most bytes of parameters that train in a run that starts iterations early. Those of adapters are a small part of a
# step's memory; those of full fine-tuning must not wait in it beside the next iteration.
MOST_TRAINED = 2**28


class Engine:
    """Advances the training state by one micro-batch at a time.

    `ending` lets another thread save while this one waits for a batch's gradients.
    """

    def __init__(self, state: TrainingState, ending: Ending, config: TrainConfig, world: World):
        self.state = state
        self.step = state.step
        self.ending = ending
        self.config = config
        self.world = world

    def settle(self) -> None:
        """Wait until nothing is being computed beside this thread."""

    def advance(self, batch: Batch, goes_on: bool) -> Advance:
        """Compute the gradients of `batch`, and make the update if it is due; return the sums over all ranks.

        The gradients are evaluated before the update, so that a failure, such as too little memory, leaves parameters
        unchanged. So are the numbers, for which a rank waits for the others. If `goes_on`, another short iteration
        follows directly, which an engine may start before this one ends.
        """
        numbers = self.added(batch, self.micro_batch(batch))
        with self.ending.waiting():
            mx.eval(self.state.sums, numbers)
        norm = self.updated()
        mx.eval(self.step.parameters(), self.step.optimizer.state, norm)
        return self.read(numbers, norm)

    def micro_batch(self, batch: Batch) -> MicroBatch:
        """Compute the present micro-batch, lazily."""
        return self.computed(batch, self.state.sums.gradients, self.state.progress.iteration)

    def computed(self, batch: Batch, accumulated: Any, iteration: int) -> MicroBatch:
        """Compute the micro-batch of an iteration, and add its gradients to `accumulated`, lazily."""
        self.step.random[0] = iteration_key(self.config.seed, iteration, self.world.rank)
        return self.step.micro_batch(batch, accumulated)

    def added(self, batch: Batch, results: MicroBatch) -> mx.array:
        """Add the results of `batch` to the sums, lazily; return the numbers that the iteration reports."""
        loss, weight, gradients, figures = results
        state = self.state
        sums = Sums(gradients, state.sums.loss + loss, state.sums.weight + weight)
        state.sums = self.step.sum_over_ranks(sums, figures) if self.completes else sums
        more = mx.array([sum(map(sum, batch.positions)), self.ending.stop.asked], mx.float32)
        return self.world.sum(mx.concatenate([mx.stack([loss, weight]), more, *(sums.reshape(-1) for sums in figures)]))

    @property
    def completes(self) -> bool:
        """Whether the present micro-batch completes an accumulation, so that an update follows."""
        return self.state.progress.micro_batches + 1 >= self.config.grad_accumulation_steps

    def updated(self) -> mx.array | None:
        """Make the update if the present micro-batch completes an accumulation, lazily; return the norm."""
        completes = self.completes
        self.state.progress.micro_batches += 1
        return self.state.update() if completes else None

    def read(self, numbers: mx.array, norm: mx.array | None) -> Advance:
        """Wait for the numbers of an iteration."""
        loss, weight, tokens, asked, *figures = as_numpy(numbers).tolist()
        return Advance(loss, weight, tokens, asked, figures, None if norm is None else number(norm))


class _Started(NamedTuple):
    """A micro-batch that was started early, or the error of its start."""

    batch: Batch
    results: MicroBatch | None
    problem: Exception | None


class EarlyEngine(Engine):
    """An engine that starts the next micro-batch while the GPU computes the present one.

    The step was made with `launcher`, the thread that evaluates its work.
    """

    def __init__(self, *of_engine: Any, launcher: Launcher):
        super().__init__(*of_engine)
        self._launcher = launcher
        self._started: _Started | None = None

    def settle(self) -> None:
        self._launcher.settle(PATIENCE)

    def advance(self, batch: Batch, goes_on: bool) -> Advance:
        started = self._started is not None and self._started.batch is batch
        before = self.step.before_update()
        try:
            with mx.stream(self._launcher.stream):
                if not goes_on:
                    self._launcher.finish()
                    return super().advance(batch, goes_on)
                numbers = self.added(batch, self.micro_batch(batch))
                norm = self._launched_beside(numbers) if started else self._launched_here(numbers)
            return self.read(numbers, norm)
        except BaseException:
            # The update was built before the sums were known to be computed.
            self.step.undo(before)
            self.state.end_update()
            raise

    def _launched_here(self, numbers: mx.array) -> mx.array | None:
        """Launch the sums, then the update if it is due, then the next micro-batch; return the norm."""
        completes = self.completes
        self._launcher.finish()
        mx.async_eval(self.state.sums, numbers)
        norm = self.updated()
        mx.async_eval(self.step.parameters(), self.step.optimizer.state, norm)
        self._start_next(completes)
        self._launch_started(mx.async_eval)
        return norm

    def _launched_beside(self, numbers: mx.array) -> mx.array | None:
        """Build the update and the next micro-batch first, while the thread still launches the sums; return the norm.

        Only the sums and the norm are waited for: MLX prepares the update and the next micro-batch together, while work
        is left for the GPU. An update that nobody has launched is made when its parameters are first read.
        """
        completes = self.completes
        compilations = self._launcher.compilations
        norm = self.updated()
        self._start_next(completes)
        launch: Callable[..., Future[None] | None] = self._launcher.launch
        if self._launcher.compilations > compilations:
            launch = mx.async_eval
        moments = dict(self.step.optimizer.state)
        # Reports read the learning rate at once.
        sums = launch(numbers, norm, moments.pop("learning_rate"), self.state.sums)
        self._launch_started(launch, self.step.parameters(), moments)
        if sums is not None:
            sums.result()
        return norm

    def micro_batch(self, batch: Batch) -> MicroBatch:
        """Compute the present micro-batch, which may have been started already."""
        started = self._started
        self._started = None
        if started is None or started.batch is not batch:
            self.settle()
            return super().micro_batch(batch)
        if started.problem is not None:
            raise started.problem
        assert started.results is not None
        return started.results

    def _start_next(self, after_update: bool) -> None:
        """Build the next micro-batch. An error in it is raised when its turn comes, after this one has been counted."""
        batch = self.state.order.peek()
        # A vision tower that does not train would be waited for here.
        if batch is None or batch.images is not None:
            return
        accumulated = self.step.zeros() if after_update else self.state.sums.gradients
        try:
            results = self.computed(batch, accumulated, self.state.progress.iteration + 1)
            self._started = _Started(batch, results, None)
        except Exception as error:  # noqa: BLE001  (it is raised in micro_batch)
            self._started = _Started(batch, None, error)

    def _launch_started(self, launch: Callable[..., object], *update: Any) -> None:
        started = self._started
        results = [] if started is None else [started.results, self.step.random]
        try:
            launch(update, results)
        except Exception as error:
            if started is None:
                raise
            self._started = started._replace(results=None, problem=error)


def starts_early(model: nn.Module, config: TrainConfig, world: World) -> bool:
    """Whether an EarlyEngine serves a run with all weights in memory: on GPUs, where little enough trains."""
    trained = sum(leaf.nbytes for _, leaf in leaves(model.trainable_parameters()))
    return may_start_early(config, world) and trained <= MOST_TRAINED


def may_start_early(config: TrainConfig, world: World) -> bool:
    """Whether iterations may be started early: on GPUs.

    Nothing is gained where ranks speak over the CPU, where a message waits until all started work has been computed.
    Several ranks with trained losses of routers wait for one another's sums within the step.
    """
    connected = world.size == 1 or world.backend == "nccl"
    routers_wait = world.size > 1 and bool(config.router_aux_loss_coef)
    return backend.computes_beside_host() and connected and not routers_wait
