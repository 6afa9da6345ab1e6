"""Chooses the layers that `grad_checkpoint: auto` checkpoints: as few as the memory allows.

Which layers come first was found by planning Qwen3.5's shapes (docs/log.md). A layer near the input is checkpointed
before one near the loss, since the layers above it have freed what they kept when it is computed again. A recurrent
layer is checkpointed before one with attention, which keeps less and takes longer to compute again in a long row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.nn as nn

from ..layers import LayerInfo, describe
from ..train.tree import leaves
from .device_limits import DeviceLimits
from .forecast import Forecast
from .search import fits

# The share of the device's memory that the chosen step may take. The rest is for what a plan does not know.
SHARE = 0.9
# More plans than this do not pay: each takes seconds for a large model.
_PLANS = 6


@dataclass(frozen=True)
class Choice:
    """Which layers are checkpointed.

    Args:
        layers: their positions in the model.
        again: how many layers are computed again in the backward pass.
        of: how many layers the backward pass reaches.
        forecast: the step with these checkpoints.
    """

    layers: list[int]
    again: int
    of: int
    forecast: Forecast

    def __str__(self) -> str:
        return (
            f"Checkpoints (auto): {self.again} of {self.of} layers are computed again in the backward pass, and "
            f"{self.of - self.again} are kept whole."
        )


@dataclass(frozen=True)
class Order:
    """The layers of a model in the order in which they are checkpointed.

    Args:
        frozen: positions of layers that the backward pass does not reach. To checkpoint them costs nothing.
        reached: positions of the others, the first to be checkpointed first.
    """

    frozen: list[int]
    reached: list[int]

    def but(self, kept: int) -> list[int]:
        """The positions of the layers to checkpoint where `kept` of those reached are kept whole."""
        return sorted(self.frozen + self.reached[: len(self.reached) - kept])

    def choice(self, layers: Sequence[int], forecast: Forecast) -> Choice:
        """The choice of the layers at these positions."""
        return Choice(list(layers), len(set(layers) & set(self.reached)), len(self.reached), forecast)


def order_of(model: nn.Module) -> Order:
    """The order of the layers of `model`, which is prepared for training."""
    layers = describe(model)
    first = _first_reached(model, layers)
    reached = sorted(range(first, len(layers)), key=lambda at: layers[at].kind == "attention")
    return Order(list(range(first)), reached)


def _first_reached(model: nn.Module, layers: Sequence[LayerInfo]) -> int:
    """The position of the first layer that the backward pass reaches."""
    inside = {id(array) for layer in layers for _, array in leaves(layer.module.trainable_parameters())}
    if any(id(array) not in inside for _, array in leaves(model.trainable_parameters())):
        # Something beside the layers trains. It may be the embedding, which lies before all of them.
        return 0
    return next((at for at, layer in enumerate(layers) if leaves(layer.module.trainable_parameters())), 0)


def choose(attempt: Callable[[list[int]], Forecast], order: Order, limits: DeviceLimits) -> Choice:
    """Choose the fewest layers with which the step takes at most SHARE of the device's memory; all if none do.

    Memory grows with the layers that are kept whole, so the number tried next is where a straight line from the
    largest step that fits to the smallest that does not meets the limit. At most six plans are made.

    Args:
        attempt: makes the plan for the positions of the layers to checkpoint.
        order: which layers to checkpoint first.
        limits: the limits of the device.
    """
    most = None if limits.bytes is None else int(SHARE * limits.bytes)
    limits = replace(limits, bytes=most)
    good, bad = 0, len(order.reached)
    plans = {bad: attempt(order.but(bad))}
    if fits(plans[bad], limits):
        return order.choice(order.but(bad), plans[bad])
    plans[good] = attempt(order.but(good))
    while bad - good > 1 and len(plans) < _PLANS and fits(plans[good], limits):
        kept = min(max(_meets(plans, good, bad, limits), good + 1), bad - 1)
        plans[kept] = attempt(order.but(kept))
        good, bad = (kept, bad) if fits(plans[kept], limits) else (good, kept)
    return order.choice(order.but(good), plans[good])


def _meets(plans: dict[int, Forecast], good: int, bad: int, limits: DeviceLimits) -> int:
    """How many layers can be kept whole, by the straight line between the plans for `good` and `bad` of them."""
    found = [bad]
    for limit, amount in ((limits.bytes, "bytes"), (limits.buffers, "buffers")):
        first, last = (getattr(plans[kept], amount).amount for kept in (good, bad))
        if limit is not None and last > limit:
            found.append(good + (limit - first) * (bad - good) // (last - first))
    return min(found)
