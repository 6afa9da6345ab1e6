"""Adds the losses of routers to the gradient of a step, and reports them (ops/experts/routing.py defines both)."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...data import Batch
from ...errors import UserError
from ...ops.experts import routing
from ...options.config import TrainConfig
from ...patches.tables.experts import has_routers

#: What a step reports of a mixture's routers, under the names that transformers has for them.
FIGURES = ("aux_loss", "z_loss")


class RouterLosses(NamedTuple):
    """The weights of the load-balancing loss and of the z-loss; with both 0, they are only reported."""

    aux: float
    z: float

    @property
    def trained(self) -> bool:
        """Whether the gradient has a part from these losses."""
        return bool(self.aux or self.z)

    def of(self, sums: list[mx.array], weight: mx.array) -> tuple[mx.array, mx.array]:
        """Return what is added to the mean loss of a micro-batch, and [2, 2]: what is reported, and its weights.

        Args:
            sums: What the routers collected.
            weight: The sum of the weights of the micro-batch's targets. Without targets, nothing is trained.
        """
        losses = mx.stack(list(routing.losses(sums)))
        added = self.aux * losses[0] + self.z * losses[1] if self.trained else mx.array(0.0)
        reported = mx.stack([losses * weight, mx.broadcast_to(weight, (2,))])
        return mx.where(weight > 0, added, 0.0), mx.stop_gradient(reported)


def router_figures(model: nn.Module) -> tuple[str, ...]:
    """Return the names of what a model's routers add to the report of a step; none for a model without routers."""
    return FIGURES if has_routers(model) else ()


def router_losses(model: nn.Module, config: TrainConfig) -> RouterLosses | None:
    """Return the weights of the routers' losses for a patched model; None for a model without a router.

    Raises:
        UserError: If a weight is set and the model has no router.
    """
    losses = RouterLosses(config.router_aux_loss_coef, config.router_z_loss_coef)
    if has_routers(model):
        return losses
    if losses.trained:
        name = "router_aux_loss_coef" if losses.aux else "router_z_loss_coef"
        raise UserError(
            f"{name}: this model has no router that deltatune knows, so there is nothing to balance; leave it out."
        )
    return None


def real_lengths(batch: Batch) -> mx.array:
    """Return how many positions of each row hold tokens; behind them is padding. [B] int32."""
    return mx.array(np.array([sum(row) for row in batch.positions], np.int32))
