"""Computes micro-batches and updates, and starts a micro-batch before the results of the one before have been read.

An NVIDIA GPU waits for the CPU, which builds and launches thousands of operations a step. If nothing is due between two
iterations, the second one's forward and backward pass is therefore launched while the GPU computes the first. It waits
for nothing but the first one's update, and changes neither parameters nor optimizer. If the first one fails, or the run
is asked to stop, the results of the second are dropped, and the state is saved as if it had never been started.

Each rank starts early by itself, since nothing travels between ranks in a forward and backward pass. While a rank waits
for the others, its update can be undone: if one of them has died, the state before the update is saved. An update that
cannot be undone begins when nothing is left to wait for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..data import Batch
from ..data.batches.peekable_order import PeekableOrder
from ..machine import backend
from ..options.config import TrainConfig
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
        # Experts that are updated in place cannot be put back.
        self._can_undo = world.size > 1 and config.expert_updates != "active" and trained <= MOST_TRAINED

    def advance(self, batch: Batch, starts_next: bool) -> Advance:
        """Compute the gradients of `batch`, and make the update if it is due; return the sums over all ranks.

        Args:
            batch: The batch that the order has handed out.
            starts_next: Whether another iteration follows directly, so that it may be started before this one is done.
        """
        saving, progress, world = self._saving, self._saving.progress, self._world
        early = starts_next and self._can_start_early
        loss, weight, gradients = self._taken(batch)
        figures = [sums.reshape(-1) for sums in self._step.figures]
        sums = Sums(gradients, saving.sums.loss + loss, saving.sums.weight + weight)
        completes = progress.micro_batches + 1 >= self._config.grad_accumulation_steps
        saving.sums = self._step.sum_over_ranks(sums) if completes else sums
        del gradients, sums
        tokens = sum(sum(row) for row in batch.positions)
        numbers = [loss, weight, *figures]
        if world.size > 1:
            # All numbers travel in one message, which saves a round trip for each.
            asked = mx.array([tokens, self._ending.stop.asked], mx.float32)
            numbers = [world.sum(mx.concatenate([mx.stack([loss, weight]), asked, *figures]))]
        # The gradients are evaluated before the update, so that a failure, such as too little memory, leaves parameters
        # unchanged. So are the numbers where an update cannot be undone: no rank then waits for another within it.
        first = [loss, weight, saving.sums, [] if self._can_undo else numbers]
        if early:
            with self._waiting():
                mx.async_eval(first)
        else:
            with self._ending.waiting():
                mx.eval(first)
        del first
        progress.micro_batches += 1
        norm = None
        if completes:
            if self._can_undo:
                saving.before = self._step.before_update()
            saving.updating = True
            norm = self._step.update(*saving.sums)
            # The gradients are released before the update is evaluated, so that MLX can reuse their buffers.
            saving.sums = saving.sums._replace(gradients=None)
        with self._waiting():
            (mx.async_eval if early else mx.eval)(self._step.parameters(), self._step.optimizer.state, norm, numbers)
        if early:
            self._start_next(completes)
            with self._waiting():
                mx.eval(numbers)
        values: list[Any] = [value for array in numbers for value in np.array(array).reshape(-1).tolist()]
        if world.size == 1:
            values[2:2] = [tokens, self._ending.stop.asked]
        return Advance(tuple(values), None if norm is None else number(norm))

    def _waiting(self) -> AbstractContextManager[None]:
        """Let another thread save while this one may wait for ranks that have died, if the last update can be saved."""
        saving = self._saving
        can_save = saving.before is not None or not saving.updating
        return self._ending.waiting() if self._world.size > 1 and can_save else nullcontext()

    def _taken(self, batch: Batch) -> tuple[mx.array, mx.array, Any]:
        """Return the losses, weights and gradients of `batch`, which may have been started already."""
        started, self._started = self._started, None
        if started is None or started.batch is not batch:
            return self._launched(batch, self._saving.sums.gradients, self._saving.progress.iteration)
        if started.problem is not None:
            raise started.problem
        assert started.results is not None
        self._step.figures = started.figures
        return started.results

    def _launched(self, batch: Batch, accumulated: Any, iteration: int) -> tuple[mx.array, mx.array, Any]:
        self._step.random[0] = iteration_key(self._config.seed, iteration, self._world.rank)
        return self._step.micro_batch(batch, accumulated)

    def _start_next(self, after_update: bool) -> None:
        """Start the next micro-batch. An error in it is raised when its turn comes, after this one has been counted."""
        batch = self._order.peek()
        # A vision tower that does not train would be waited for here.
        if batch is None or batch.images is not None:
            return
        accumulated = self._step.zeros() if after_update else self._saving.sums.gradients
        results, figures, problem = None, [], None
        try:
            results = self._launched(batch, accumulated, self._saving.progress.iteration + 1)
            figures = self._step.figures
            with self._waiting():
                mx.async_eval(results, figures)
        except StoppedError:
            raise
        except Exception as error:  # noqa: BLE001  (it is raised in _taken)
            results, problem = None, error
        self._started = _Started(batch, results, figures, problem)


def may_start_early(world: World, config: TrainConfig) -> bool:
    """Whether iterations may be started early: on NVIDIA GPUs, if no update waits for which experts had tokens.

    A step by layers is computed when it returns, so that nothing is gained. Nor is it where ranks speak over the CPU,
    for which a message waits until all that was started has been computed.
    """
    connected = world.size == 1 or world.backend == "nccl"
    by_layers = config.memory is not None
    return backend.device() == "cuda" and connected and config.expert_updates != "active" and not by_layers
