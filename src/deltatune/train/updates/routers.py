"""Adds the losses of routers to the gradient of a step, and reports them (ops/experts/routing.py defines both)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...data import Batch
from ...ops.experts import routing
from ...options.conditions import TRAINING, Facts, changed_options, refuse_unread
from ...options.config import TrainConfig
from ...patches.tables.experts import has_routers
from ..distributed import World

#: The figures of a mixture's routers that a step reports, under transformers' names.
FIGURES = ("aux_loss", "z_loss")


class RouterLosses(NamedTuple):
    """The weights of the load-balancing loss and of the z-loss; with both 0, they are only reported.

    `over_ranks` sums an array over the ranks of a run, lazily; None where there is one rank. Both losses are those of
    the tokens of all ranks, because the mean of a product is not the product of the means. Where they are only
    reported, each rank reports its own, and nothing travels between ranks before the gradients.
    """

    aux: float
    z: float
    over_ranks: Callable[[mx.array], mx.array] | None = None

    @property
    def trained(self) -> bool:
        """Whether the gradient has a part from these losses."""
        return bool(self.aux or self.z)

    @property
    def wait_for_ranks(self) -> bool:
        """Whether a forward pass waits for the other ranks."""
        return self.trained and self.over_ranks is not None

    def of(self, sums: list[mx.array], weight: mx.array) -> tuple[mx.array, mx.array]:
        """Return the term to add to the mean loss of a micro-batch, and [2, 2]: the reported losses, and their weights.

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
        losses = mx.stack(list(routing.losses([total])))
        added = self.aux * losses[0] + self.z * losses[1] if self.trained else mx.array(0.0)
        reported = mx.stack([losses * weight, mx.broadcast_to(weight, (2,))])
        return added * (weight_of_all / weight_or_one(weight)), mx.stop_gradient(reported)


def mean_with(routers: RouterLosses | None, sums: list[mx.array], result: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
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


def router_losses(model: nn.Module, config: TrainConfig, world: World) -> RouterLosses | None:
    """Return the losses of the routers of a patched model; None for one without, for which no weight may be set."""
    over_ranks = world.sum if world.size > 1 else None
    losses = RouterLosses(config.router_aux_loss_coef, config.router_z_loss_coef, over_ranks)
    if has_routers(model):
        return losses
    coefficients = {name: name for name in changed_options(config) if name.startswith("router_")}
    refuse_unread(TRAINING, coefficients, config, Facts(routers=False))
    return None


def real_lengths(batch: Batch) -> mx.array:
    """Return how many positions of each row hold tokens; behind them is padding. [B] int32."""
    return mx.array(np.array([sum(row) for row in batch.positions], np.int32))
