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

from ..data import BatchOrder
from ..data.example import Example
from ..layers import gated_delta_layers
from ..machine.numpy_arrays import as_numpy
from ..ops.functional import modes_kept
from ..ops.random_state import drawing_from
from ..options.config import TrainConfig
from ..patches.whole_rows import whole_rows
from .batch_loss import Arrays, LossFunction, arrays, loss_of
from .by_layer.layer_step import by_layers
from .by_layer.layer_weights import LayerWeights
from .compiled import compiled
from .distributed import World
from .ending.nonfinite import refuse_damaged
from .preferences.figures import line, means
from .reports.screen import Screen
from .setup import batch_order, training
from .tree import number


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

    Args:
        model: The model.
        loss: The loss.
        world: The ranks of the run.
        figures: The names of what a preference loss reports besides its sums.
        by_layers: Computes the loss of a batch in the place of `loss`, with the model's layers one after another.

    Attributes:
        figures: The means of the last evaluation, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        world: World,
        figures: Sequence[str] = (),
        by_layers: Callable[[Arrays], tuple[mx.array, ...]] | None = None,
    ):
        self._model, self._loss, self._world, self._names = model, loss, world, figures
        self.figures: dict[str, float] = {}
        self._compiled = by_layers or compiled(self._trace, [model.state])

    def __call__(
        self,
        order: BatchOrder,
        batches: int = -1,
        between: Callable[[int, int], bool] | None = None,
    ) -> float | None:
        """Evaluate the first batches of `order`.

        Args:
            order: The batches.
            batches: How many batches are evaluated; -1 for all.
            between: Is called after each batch with the batches done and their total; True ends the evaluation.

        Returns:
            The mean loss over the targets, over all ranks; nan without targets; None if `between` ended it.
        """
        total = order.batches_per_epoch if batches == -1 else min(batches, order.batches_per_epoch)
        loss_sum = weight_sum = 0.0
        reported = np.zeros(2 * len(self._names))
        with evaluating(self._model), whole_rows():
            for done, batch in enumerate(islice(order.epoch(), total), start=1):
                loss, weight, *figures = self._compiled(arrays(batch))
                mx.eval(loss, weight, figures)
                loss_sum += number(loss)
                weight_sum += number(weight)
                for figure in figures:
                    reported += as_numpy(figure).ravel()
                if between is not None and between(done, total):
                    return None
        loss_sum, weight_sum, *sums = self._world.sum_numbers(loss_sum, weight_sum, *reported.tolist())
        self.figures = means(self._names, sums)
        return loss_sum / weight_sum if weight_sum else float("nan")

    def _trace(self, batch: Arrays) -> tuple[mx.array, ...]:
        with drawing_from(mx.random.key(0)):
            return loss_of(self._loss, batch)


def say_loss(
    name: str,
    model: nn.Module,
    config: TrainConfig,
    examples: Sequence[Example],
    world: World,
    screen: Screen,
    weights: LayerWeights | None = None,
) -> float:
    """Evaluate a model on `examples`, print and return the loss, and print its perplexity or figures.

    Args:
        name: The split, as lines name it.
        model: The model.
        config: The options of the run.
        examples: The examples of the split.
        world: The ranks of the run.
        screen: Where the lines are printed.
        weights: Where layers read their weights, if these stay on the disk.

    Raises:
        UserError: If the loss is not finite because a tensor of the model is not.
    """
    # Nothing is differentiated, so nothing needs to be recomputed.
    config = dataclasses.replace(config, grad_checkpoint=False)
    with (
        training(model, config, compare=weights is None) as trained,
        by_layers(model, config, trained, weights) as (trained, passes),
    ):
        by_pass = None if passes is None else passes.evaluate
        evaluation = Evaluation(model, trained.loss, world, trained.figures, by_pass)
        loss = evaluation(batch_order(examples, config, world), config.test_batches)
    assert loss is not None
    if not math.isfinite(loss):
        refuse_damaged(model, weights)
    if trained.objective is not None:
        screen.say(f"{name} loss {loss:.4f}{line(evaluation.figures)}.")
        return loss
    perplexity = math.exp(loss) if loss < 700 else math.inf
    screen.say(f"{name} loss {loss:.4f}, {name.lower()} perplexity {perplexity:.4g}.")
    return loss
