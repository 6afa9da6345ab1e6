"""Computes the loss per token over a split, which does not depend on how its examples are batched."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...data import Batch, BatchOrder
from ...data.example import Example
from ...errors import NoResultError
from ...layers import gated_delta_layers
from ...machine.host_memory import as_numpy
from ...ops.functional import modes_kept
from ...ops.random_state import drawing_from
from ...ops.recomputation import Checkpoints
from ...options.config import TrainConfig
from ...patches.whole_rows import whole_rows
from ..batch_loss import Arrays, arrays, loss_of
from ..by_layer.layer_step import by_layers
from ..by_layer.store import Store
from ..compiled import Compiled
from ..distributed import World
from ..preferences.objectives import line, means
from ..reports.screen import Screen
from ..setup import Training, batch_order, training
from ..tree import number
from .nonfinite import FirstOutput, damage, first_output, watched

# The loss up to which its perplexity is a number of 64 bits.
_LARGEST = 700.0


@contextmanager
def inferring(model: nn.Module) -> Iterator[None]:
    """Switch `model` to evaluation mode, without dropout, inside the `with` block; afterwards its mode is restored."""
    with modes_kept(model):
        model.eval()
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch `model` to evaluation mode as inferring() does, except its gated-delta mixers.

    In these, training mode only chooses deltatune's implementation over upstream's.
    """
    mixers = list(gated_delta_layers(model).values())
    with inferring(model):
        for mixer in mixers:
            inner = mixer.modules()[1:]
            mixer.train()
            for module in inner:
                module.eval()
        yield


class Evaluation:
    """Computes the loss per token, or per preference, of `model`; it is compiled once for each batch shape.

    `figures` are the means of the last evaluation. `weights` is the store of layers that stay on the disk. A message
    names the layer whose output is not finite.
    """

    def __init__(self, model: nn.Module, trained: Training, world: World, weights: Store | None = None):
        self._model = model
        self._trained = trained
        self._passes = trained.passes
        self._world = world
        self._weights = weights
        self.figures: dict[str, float] = {}
        self._compiled = Compiled(self._trace, [model.state]) if self._passes is None else self._passes.evaluate

    def __call__(
        self, order: BatchOrder, batches: int = -1, between: Callable[[int, int], bool] | None = None
    ) -> float | None:
        """Evaluate the first batches of `order`, all with -1.

        `between` is called after each batch with the batches done and their total; True ends the evaluation. Returns
        the mean loss over the targets, over all ranks: nan without targets, None if `between` ended it. Where the loss
        of a batch is not finite on some rank, every rank raises NoResultError.
        """
        total = order.batches_per_epoch if batches == -1 else min(batches, order.batches_per_epoch)
        loss_sum = weight_sum = 0.0
        reported = np.zeros(2 * len(self._trained.figures))
        with evaluating(self._model), whole_rows():
            for done, batch in enumerate(map(self._trained.taught, islice(order.epoch(), total)), start=1):
                loss, weight, *figures = self._compiled(arrays(batch))
                mx.eval(loss, weight, figures)
                loss_sum += number(loss)
                weight_sum += number(weight)
                for figure in figures:
                    reported += as_numpy(figure).ravel()
                if not math.isfinite(loss_sum):
                    break
                if between is not None and between(done, total):
                    return None
        loss_sum, weight_sum, *sums = self._world.sum_numbers(loss_sum, weight_sum, *reported.tolist())
        if not math.isfinite(loss_sum):
            raise self._refusal(batch)
        self.figures = means(self._trained.figures, sums)
        return loss_sum / weight_sum if weight_sum else float("nan")

    def _refusal(self, batch: Batch) -> NoResultError:
        """Return the error of a loss that is not finite on some rank; `batch` is the last one of this rank."""
        if description := damage(self._model, self._weights):
            return NoResultError(description)
        layers = watched(self._trained.layers)
        inputs = arrays(batch)
        first = FirstOutput()
        with evaluating(self._model), whole_rows():
            if self._passes is None:
                first = first_output(layers, lambda: mx.eval(self._trace(inputs)))
            else:
                self._passes.evaluate(inputs, watch=lambda at, array, *, backward: first.see(layers[at][0], array))
        names = [None, *(name for name, _ in layers)]
        # A rank with sound rows names the layer of another.
        name = names[int(self._world.largest(names.index(first.name)))]
        rows = "of another rank"
        if name == first.name:
            rows = ", ".join(source for row in batch.sources for source in row)
        first = dataclasses.replace(first, name=name)
        return NoResultError(f"the loss is not finite: {first}. {first.remedy} The rows: {rows}.")

    def _trace(self, batch: Arrays) -> tuple[mx.array, ...]:
        with drawing_from(mx.random.key(0)):
            return loss_of(self._trained.loss, batch)


def say_loss(
    name: str,
    model: nn.Module,
    config: TrainConfig,
    examples: Sequence[Example],
    world: World,
    screen: Screen,
    weights: Store | None = None,
) -> float:
    """Evaluate a model on the examples of a split, print and return the loss, and print its perplexity or figures.

    `weights` is the store of layers that stay on the disk. A loss that is not finite raises NoResultError.
    """
    if config.loss == "distill":
        # A test set measures what all runs measure, the cross-entropy of its answers.
        config = dataclasses.replace(config, loss="sft")
    if config.mtp:
        # The loss is the model's, even of a run that trained the head alone.
        config = dataclasses.replace(config, mtp=True)
    # Nothing is differentiated, so nothing needs to be recomputed.
    with (
        training(model, config, compare=weights is None, checkpoints=Checkpoints()) as trained,
        by_layers(model, config, trained, weights) as trained,
    ):
        evaluation = Evaluation(model, trained, world, weights)
        loss = evaluation(batch_order(examples, config, world), config.test_batches)
    assert loss is not None
    if trained.objective is not None:
        screen.say(f"{name} loss {loss:.4f}{line(evaluation.figures)}.")
        return loss
    perplexity = f"{math.exp(loss):.4g}" if loss < _LARGEST else f"above {math.exp(_LARGEST):.0e}"
    screen.say(f"{name} loss {loss:.4f}, {name.lower()} perplexity {perplexity}{line(evaluation.figures)}.")
    return loss
