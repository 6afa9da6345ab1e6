"""Computes micro-batches and updates, and starts a micro-batch before the results of the one before have been read.

An NVIDIA GPU waits for the CPU, which builds and launches thousands of operations a step. If nothing is due between two
iterations, the second one's forward and backward pass is therefore launched while the GPU computes the first. It waits
for nothing but the first one's update, and changes neither parameters nor optimizer. If the first one fails, or the run
is asked to stop, the results of the second are dropped, and the state is saved as if it had never been started.
From the second iteration of such a row on, a thread of its own launches what the main thread builds (launcher.py).

Each rank starts early by itself, since nothing travels between ranks in a forward and backward pass. Where the losses
of routers train, their sums travel there, and several ranks start nothing early. While a rank waits for the others,
its update can be undone: if one of them has died, the state before the update is saved. An update that cannot be
undone begins when nothing is left to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import mlx.core as mx

from ..data import Batch
from ..data.batches.peekable_order import PeekableOrder
from ..machine import backend
from ..machine.numpy_arrays import as_numpy
from ..options.config import TrainConfig
from . import launcher
from .distributed import World
from .ending.early_end import Ending
from .ending.interrupt import StoppedError
from .reports.result import Advance
from .saved.saving import Saving
from .step import Step, Sums
from .tree import iteration_key, leaves, number

# The most bytes of parameters that train in a run that starts iterations early. Those of adapters are a small part of a
# step's memory; those of full fine-tuning must not wait in it beside the next iteration.
MOST_TRAINED = 2**28
# Iterations of more seconds are not worth it, and a second Ctrl-C has to wait for one that was started early.
LONGEST = 1.0


class _Started(NamedTuple):
    """A micro-batch that was started early, or the error that starting it met."""

    batch: Batch
    results: tuple[mx.array, mx.array, Any] | None
    figures: list[mx.array]
    problem: Exception | None


class MicroBatches:
    """Computes the micro-batches of a run one after another, and the update where one is due.

    Args:
        step: The compiled step.
        saving: The sums and the progress of the run.
        ending: It lets another thread save while this one waits for a batch's gradients.
        order: The training batches.
        config: The options of the run.
        world: The ranks of the run.
    """

    def __init__(
        self, step: Step, saving: Saving, ending: Ending, order: PeekableOrder, config: TrainConfig, world: World
    ):
        self._step = step
        self._saving, self._ending, self._order = saving, ending, order
        self._config, self._world = config, world
        self._started: _Started | None = None
        trained = sum(leaf.nbytes for _, leaf in leaves(step.model.trainable_parameters()))
        self._can_start_early = may_start_early(world, config) and trained <= MOST_TRAINED
        beside = self._can_start_early and launcher.supported()
        self._launcher = launcher.Launcher() if beside else None
        step.separate = beside
        by_ranks = world.size > 1 and trained <= MOST_TRAINED
        self._can_undo = by_ranks or self._launcher is not None
        # Whether a step was compiled since the last launch. What it reads for the first time may have been made on
        # another stream, so that only this thread can evaluate it.
        self._compiled = False

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Within the context, iterations that start early are launched by a thread of its own."""
        if self._launcher is None:
            yield
            return
        self._step.before_tracing, self._saving.before_writing = self._before_tracing, self.settle
        with self._launcher:
            yield

    def settle(self) -> None:
        """Wait until everything is launched, so that this thread may evaluate what belongs to the other.

        It does not wait for long: a rank that has died may hold a message between ranks forever.
        """
        if self._launcher is not None:
            self._launcher.settle(launcher.PATIENCE)

    def _before_tracing(self) -> None:
        # What is being launched here waits for no other rank, but a long batch may take its time.
        assert self._launcher is not None
        self._launcher.settle()
        self._compiled = True

    def advance(self, batch: Batch, starts_next: bool) -> Advance:
        """Compute the gradients of `batch`, and make the update if it is due; return the sums over all ranks.

        Args:
            batch: The batch that the order has handed out.
            starts_next: Whether another iteration follows directly, so that it may be started before this one is done.
        """
        early = starts_next and self._can_start_early
        started = self._started is not None and self._started.batch is batch
        beside = early and started and self._launcher is not None
        with nullcontext() if self._launcher is None else mx.stream(self._launcher.stream):
            numbers = self._summed(batch)
            norm = self._launched_beside(numbers) if beside else self._launched_here(numbers, early)
        with self._waiting() if early else nullcontext():
            mx.eval(numbers)
        values = tuple(as_numpy(numbers).tolist())
        return Advance(values, None if norm is None else number(norm))

    def _summed(self, batch: Batch) -> mx.array:
        """Add what `batch` gives to the sums, lazily; return what the iteration reports, which no computation reads."""
        saving = self._saving
        loss, weight, gradients = self._taken(batch)
        figures = [sums.reshape(-1) for sums in self._step.figures]
        sums = Sums(gradients, saving.sums.loss + loss, saving.sums.weight + weight)
        saving.sums = self._step.sum_over_ranks(sums) if self._completes else sums
        asked = mx.array([_tokens(batch), self._ending.stop.asked], mx.float32)
        return self._world.sum(mx.concatenate([mx.stack([loss, weight]), asked, *figures]))

    @property
    def _completes(self) -> bool:
        """Whether the present micro-batch completes an accumulation, so that an update follows."""
        return self._saving.progress.micro_batches + 1 >= self._config.grad_accumulation_steps

    def _launched_here(self, numbers: mx.array, early: bool) -> mx.array | None:
        """Compute the sums, then the update if it is due, then the next micro-batch if `early`; return the norm.

        The gradients are evaluated before the update, so that a failure, such as too little memory, leaves parameters
        unchanged. So are the numbers where an update cannot be undone: no rank then waits for another within it.
        """
        completes = self._completes
        if self._launcher is not None:
            with self._waiting():
                self._launcher.finish()
        first: list[Any] = [self._saving.sums, [] if self._can_undo else numbers]
        if early:
            with self._waiting():
                mx.async_eval(first)
        else:
            with self._ending.waiting():
                mx.eval(first)
        del first
        norm = self._updated(completes)
        with self._waiting():
            (mx.async_eval if early else mx.eval)(self._step.parameters(), self._step.optimizer.state, norm, numbers)
        if early:
            self._start_next(completes)
            self._launch_started(mx.async_eval)
        return norm

    def _launched_beside(self, numbers: mx.array) -> mx.array | None:
        """Do early what _launched_here() does, but build all of it first, while the thread still launches the sums.

        Only the sums and the norm are waited for: MLX prepares the update and the next micro-batch together, while work
        is left for the GPU. An update that nobody has launched is made when its parameters are first read.
        """
        assert self._launcher is not None
        completes, self._compiled = self._completes, False
        norm = self._updated(completes)
        self._start_next(completes)
        launch: Callable[..., Future[None] | None] = mx.async_eval if self._compiled else self._launcher.launch
        state = dict(self._step.optimizer.state)
        # Reports read the learning rate at once.
        sums = launch(numbers, norm, state.pop("learning_rate"), self._saving.sums)
        self._launch_started(launch, self._step.parameters(), state)
        if sums is not None:
            with self._waiting():
                sums.result()
        return norm

    def _updated(self, completes: bool) -> mx.array | None:
        """Make the update if the present micro-batch completes an accumulation, lazily; return the norm."""
        saving = self._saving
        saving.progress.micro_batches += 1
        if not completes:
            return None
        if self._can_undo:
            saving.before = self._step.before_update()
        saving.updating = True
        norm = self._step.update(*saving.sums)
        # The gradients are released before the update is evaluated, so that MLX can reuse their buffers.
        saving.sums = saving.sums._replace(gradients=None)
        return norm

    def _waiting(self) -> AbstractContextManager[None]:
        """Let another thread save while this one may wait for ranks that have died, if the last update can be saved."""
        saving = self._saving
        can_save = saving.before is not None or not saving.updating
        return self._ending.waiting() if self._world.size > 1 and can_save else nullcontext()

    def _taken(self, batch: Batch) -> tuple[mx.array, mx.array, Any]:
        """Return the losses, weights and gradients of `batch`, which may have been started already."""
        started, self._started = self._started, None
        if started is None or started.batch is not batch:
            self.settle()
            return self._micro_batch(batch, self._saving.sums.gradients, self._saving.progress.iteration)
        if started.problem is not None:
            raise started.problem
        assert started.results is not None
        self._step.figures = started.figures
        return started.results

    def _micro_batch(self, batch: Batch, accumulated: Any, iteration: int) -> tuple[mx.array, mx.array, Any]:
        self._step.random[0] = iteration_key(self._config.seed, iteration, self._world.rank)
        return self._step.micro_batch(batch, accumulated)

    def _start_next(self, after_update: bool) -> None:
        """Build the next micro-batch. An error in it is raised when its turn comes, after this one has been counted."""
        batch = self._order.peek()
        # A vision tower that does not train would be waited for here.
        if batch is None or batch.images is not None:
            return
        accumulated = self._step.zeros() if after_update else self._saving.sums.gradients
        results, figures, problem = None, [], None
        try:
            results = self._micro_batch(batch, accumulated, self._saving.progress.iteration + 1)
            figures = self._step.figures
        except StoppedError:
            raise
        except Exception as error:  # noqa: BLE001  (it is raised in _taken)
            problem = error
        self._started = _Started(batch, results, figures, problem)

    def _launch_started(self, launch: Callable[..., object], *update: Any) -> None:
        """Launch the update that is given, and the micro-batch that was started."""
        started = self._started
        results = [] if started is None else [started.results, started.figures, self._step.random]
        try:
            with self._waiting():
                launch(update, results)
        except StoppedError:
            raise
        except Exception as error:
            if started is None:
                raise
            self._started = started._replace(results=None, problem=error)


def _tokens(batch: Batch) -> int:
    return sum(sum(row) for row in batch.positions)


def may_start_early(world: World, config: TrainConfig) -> bool:
    """Whether iterations may be started early: on NVIDIA GPUs.

    A step by layers is computed when it returns, so that nothing is gained. Nor is it where ranks speak over the CPU,
    for which a message waits until all that was started has been computed. Several ranks whose routers' losses train
    wait for one another's sums within the step.
    """
    connected = world.size == 1 or world.backend == "nccl"
    by_layers = config.memory is not None
    routers_wait = world.size > 1 and bool(config.router_aux_loss_coef or config.router_z_loss_coef)
    return backend.device() == "cuda" and connected and not by_layers and not routers_wait
