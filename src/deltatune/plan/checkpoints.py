"""Chooses the layers that `grad_checkpoint: auto` recomputes in the backward pass: as few as the memory allows.

The cheap operators of all layers come first, since they free the most memory for their time. Which layers come next was
found by planning Qwen3.5's shapes (docs/decisions/memory.md). A layer near the input is checkpointed before one near
the loss, since the layers above it have freed their saved tensors when it is recomputed. A recurrent layer is
checkpointed before one with attention, which keeps less and takes longer to compute again in a long row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.nn as nn

from ..layers import describe
from ..ops.recomputation import Checkpoints
from ..train.by_layer.layer_functions import lowest_layer
from .device_limits import DeviceLimits
from .forecast import Forecast
from .search import fits, largest

# The share of the device's memory that the chosen step may take. The rest is for memory that a plan does not know.
SHARE = 0.9
# More plans than this do not pay: each takes seconds for a large model.
_PLANS = 5


@dataclass(frozen=True)
class Choice:
    """A choice to recompute `again` layers `of` those that the backward pass reaches, and the step with it."""

    checkpoints: Checkpoints
    again: int
    of: int
    forecast: Forecast

    def __str__(self) -> str:
        others = "the cheap operators of the others too" if self.checkpoints.operators else "the others are kept whole"
        return (
            f"Checkpoints (auto): {self.again} of {self.of} layers are recomputed in the backward pass, and {others}."
        )


@dataclass(frozen=True)
class Order:
    """The positions of layers in the order in which they are checkpointed.

    The backward pass does not reach the `frozen` ones, which cost nothing.
    """

    frozen: list[int]
    reached: list[int]

    def first(self, layers: int, *, operators: bool) -> Checkpoints:
        """The checkpoints of so many layers that are reached, with or without cheap operators of the others."""
        return Checkpoints(sorted(self.frozen + self.reached[:layers]), operators)

    def count(self, checkpoints: Checkpoints) -> int:
        """How many layers that are reached are among the checkpoints."""
        return len(set(checkpoints.layers) & set(self.reached))

    def choice(self, checkpoints: Checkpoints, forecast: Forecast) -> Choice:
        """The choice of these checkpoints."""
        return Choice(checkpoints, self.count(checkpoints), len(self.reached), forecast)


def order_of(model: nn.Module) -> Order:
    """The order of the layers of `model`, which is prepared for training."""
    layers = describe(model)
    first = lowest_layer(model, [layer.path for layer in layers])
    reached = sorted(range(first, len(layers)), key=lambda at: layers[at].kind == "attention")
    return Order(list(range(first)), reached)


def choose(
    attempt: Callable[[Checkpoints], Forecast], order: Order, limits: DeviceLimits, *, operators: bool = True
) -> Choice:
    """Choose the fewest layers with which at most SHARE of the device's memory is taken; all if none do.

    No layer and no operator are tried first, then the cheap operators of all layers, then layers besides. If these
    layers are enough without the operators, as where few layers are kept of a long row, no operators are chosen; nor
    are they without `operators`. `attempt` plans the step with these checkpoints.
    """
    most = None if limits.bytes is None else int(SHARE * limits.bytes)
    limits = replace(limits, bytes=most)
    plans: dict[tuple[int, bool], Forecast] = {}

    def planned(layers: int, again: bool) -> Forecast:
        if (layers, again) not in plans:
            plans[layers, again] = attempt(order.first(layers, operators=again))
        return plans[layers, again]

    def chosen(layers: int, again: bool) -> Choice:
        return order.choice(order.first(layers, operators=again), planned(layers, again))

    for again in (False, True) if operators else (False,):
        if fits(planned(0, again), limits):
            return chosen(0, again)
    count = len(order.reached)

    def fewest(most: int, again: bool) -> int:
        """The fewest of at most so many layers with a plan that fits; `most` itself where none fits."""
        whole = planned(0, again)
        none = planned(most, again)
        known = {most: whole}
        values = range(1, most)
        return most - largest(lambda n: planned(most - n, again), limits, known, values, none, plans=_PLANS).value

    layers = count
    if operators:
        layers = fewest(layers, True)
        # A layer that is recomputed as a whole leaves nothing to the operators.
        if layers < count and not fits(planned(layers, False), limits):
            return chosen(layers, True)
    return chosen(fewest(layers, False), False)
