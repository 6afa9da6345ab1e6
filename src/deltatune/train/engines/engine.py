"""Computes the micro-batches of a run, and an update where one is due, each to its end before the next."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...data import Batch
from ...machine.numpy_arrays import as_numpy
from ...options.config import TrainConfig
from ..distributed import World
from ..ending.early_end import Ending
from ..progress import Advance
from ..step import MicroBatch, Sums
from ..training_state import TrainingState
from ..tree import iteration_key, number


class Engine:
    """Advances the training state by one micro-batch at a time.

    Args:
        state: The training state.
        ending: It lets another thread save while this one waits for a batch's gradients.
        config: The options of the run.
        world: The ranks of the run.

    Attributes:
        step: The compiled step of `state`.
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
        unchanged. So are the numbers, for which a rank waits for the others.

        Args:
            batch: The batch that the order has handed out.
            goes_on: Whether another short iteration follows directly; an engine may then start it before this one ends.
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
        return Advance(tuple(as_numpy(numbers).tolist()), None if norm is None else number(norm))
