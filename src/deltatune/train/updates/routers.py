"""Adds the load-balancing loss of routers to the gradient of a step, and reports it (see ops/experts/routing.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...data import Batch
from ...ops.experts import routing
from ...options.conditions import TRAINING, Facts, refuse_unread
from ...options.config import TrainConfig
from ...patches.tables.experts import has_routers
from ..distributed import World

#: The figure of a mixture's routers that a step reports, under transformers' name.
FIGURES = ("aux_loss",)


class RouterLoss(NamedTuple):
    """The weight of the load-balancing loss of a mixture; with 0, the loss is only reported.

    `over_ranks` sums an array over the ranks of a run, lazily; None where there is one rank. The loss is that of the
    tokens of all ranks, because the mean of a product is not the product of the means. Where it is only reported, each
    rank reports its own, and nothing travels between ranks before the gradients.
    """

    factor: float
    over_ranks: Callable[[mx.array], mx.array] | None = None

    @property
    def trained(self) -> bool:
        """Whether the gradient has a part from this loss."""
        return bool(self.factor)

    @property
    def wait_for_ranks(self) -> bool:
        """Whether a forward pass waits for the other ranks."""
        return self.trained and self.over_ranks is not None

    def of(self, sums: list[mx.array], weight: mx.array) -> tuple[mx.array, mx.array]:
        """Return the term to add to the mean loss of a micro-batch, and [2, 1]: the reported loss, and its weight.

        The first is multiplied by `weight_or_one` of the rank's weight and summed over the ranks, and so has the weight
        of the micro-batch's targets on all ranks. Without any target, nothing is trained. `sums` are those that the
        routers collected, and `weight` is that of the targets on this rank.
        """
        total = sum(sums[1:], start=sums[0])
        weight_of_all = weight
        if self.wait_for_ranks:
            assert self.over_ranks is not None
            *_, weight_of_all = summed = self.over_ranks(mx.stop_gradient(mx.concatenate([total, weight[None]])))
            # The value is that of all ranks, and the gradient goes to this rank's part of it.
            total = total + mx.stop_gradient(summed[:-1] - total)
        loss = routing.loss(total)
        added = self.factor * loss if self.trained else mx.array(0.0)
        reported = mx.stack([loss * weight, weight])[:, None]
        return added * (weight_of_all / weight_or_one(weight)), mx.stop_gradient(reported)


def mean_with(routers: RouterLoss | None, sums: list[mx.array], result: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    """Return the mean loss of a batch with the term of its routers, and the `result` of its loss with their figures.

    `sums` are those that the routers collected.
    """
    total, weight, *figures = result
    mean = total / weight_or_one(weight)
    if routers is not None:
        added, reported = routers.of(sums, weight)
        mean = mean + added
        figures = [mx.concatenate([*figures, reported], axis=1)]
    return mean, total, weight, *figures


def weight_or_one(weight: mx.array) -> mx.array:
    """Return the weight of a micro-batch's targets on one rank, by which its mean loss is divided; 1 without any."""
    return mx.where(weight > 0, weight, 1.0)


def router_figures(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the figures that routers add to a step's report; none for a model without routers."""
    return FIGURES if has_routers(model) else ()


def router_loss(model: nn.Module, config: TrainConfig, world: World) -> RouterLoss | None:
    """Return the loss of the routers of a patched model; None for one without, for which no weight may be set."""
    over_ranks = world.sum if world.size > 1 else None
    if has_routers(model):
        return RouterLoss(config.router_aux_loss_coef, over_ranks)
    if config.router_aux_loss_coef:
        name = "router_aux_loss_coef"
        refuse_unread(TRAINING, {name: name}, config, Facts(routers=False))
    return None


def real_lengths(batch: Batch) -> mx.array:
    """Return how many positions of each row hold tokens; behind them is padding. [B] int32."""
    return mx.array(np.array([sum(row) for row in batch.positions], np.int32))
