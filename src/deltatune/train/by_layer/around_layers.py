"""Computes what a model does before its layers, between them and behind them, forward and backward, in compiled parts.

What a vision tower that trains makes of pictures is computed once, before all of it, and is an input of the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ...models.vision.tower import TowerInputs, run_tower
from ...ops.functional import undisturbed
from ...ops.random_state import drawing_with
from ..batch_loss import Arrays, LossFunction
from ..compiled import Compiled
from ..tree import Place
from ..updates.routers import RouterLosses, weight_or_one
from .layer_calls import Recorder


def seen_by_tower(batch: Arrays) -> dict[str, mx.array] | None:
    """Return what a vision tower that trains is given of a batch; None without pictures, or with their features."""
    return None if batch.images is None else batch.images.get("tower")


def with_pictures(batch: Arrays, pictures: Sequence[mx.array]) -> Arrays:
    """Return a batch with what the tower has made of its pictures: features, and those of deeper layers."""
    if not pictures:
        return batch
    assert batch.images is not None
    images = {name: value for name, value in batch.images.items() if name != "tower"}
    return batch._replace(images=images | {"features": pictures[0], "deep": list(pictures[1:])})


def _pictures_of(batch: Arrays) -> list[mx.array]:
    """Return what with_pictures() has put into a batch."""
    images = batch.images or {}
    return [images["features"], *images["deep"]] if "features" in images else []


class Outside:
    """Arrays that train outside the layers.

    Args:
        places: Where the model holds them, by their paths.
    """

    def __init__(self, places: dict[str, Place]):
        self._places = places

    @property
    def paths(self) -> list[str]:
        """Their paths."""
        return list(self._places)

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that the model holds."""
        return [place.array for place in self._places.values()]

    @contextmanager
    def holding(self, arrays: Sequence[mx.array]) -> Iterator[None]:
        """Within the context, the model holds `arrays` in the place of its own."""
        before = self.arrays
        try:
            self._put(arrays)
            yield
        finally:
            self._put(before)

    def _put(self, arrays: Sequence[mx.array]) -> None:
        for place, array in zip(self._places.values(), arrays, strict=True):
            place.array = array


class PartlyRun(Protocol):
    """Runs a model without its layers, as LayerPasses does."""

    model: nn.Module
    loss: LossFunction
    outer: Outside
    in_tower: Outside

    def recorded(self, batch: Arrays, key: mx.array) -> tuple[Recorder, mx.array]:
        """Run it with layers that are only recorded; return these, and the key before the first of them."""

    def entering(self, entered: int, batch: Arrays, y: mx.array) -> mx.array:
        """Return what the layer at a position is given where the one before has returned y."""

    def loss_behind(self, loss: LossFunction, batch: Arrays, x: mx.array, key: mx.array) -> tuple[mx.array, ...]:
        """Return a loss where the last layer returns x, and what follows draws from `key`."""


class AroundLayers:
    """The parts of a model around its layers, compiled for batches of one kind.

    Args:
        passes: Runs the model without its layers.
        routers: What is added to the mean loss for the routers of a mixture.

    Attributes:
        recorded: How the layers are called, once before() was traced.
        loss: Returns PartlyRun.loss_behind() of a loss, compiled.
    """

    def __init__(self, passes: PartlyRun, routers: RouterLosses | None):
        self._passes, self._routers = passes, routers
        self.recorded = Recorder()
        state = [passes.model.state]
        self.tower = Compiled(self._tower, state)
        self.tower_again = Compiled(self._tower_again, state)
        self.before = Compiled(self._before, state)
        self.before_again = Compiled(self._before_again, state)
        self.behind = Compiled(self._behind, state)
        self.loss = cache(lambda loss: Compiled(partial(passes.loss_behind, loss), state))
        self._between = cache(lambda index: Compiled(partial(passes.entering, index), state))
        self._between_again = cache(lambda index: Compiled(partial(self._between_backward, index), state))

    def between(self, index: int, batch: Arrays, y: mx.array) -> mx.array:
        """Return what the layer at a position is given where the one before has returned y."""
        if index not in self.recorded.changed:
            return y
        x: mx.array = self._between(index)(batch, y)
        return x

    def between_again(self, index: int, batch: Arrays, y: mx.array, dx: mx.array) -> tuple[mx.array, list[mx.array]]:
        """Return the gradients of y and of what a tower made of pictures, from that of between()."""
        if index not in self.recorded.changed:
            return dx, []
        dy, *d_pictures = self._between_again(index)(batch, y, dx)
        return dy, d_pictures

    def _between_backward(self, index: int, batch: Arrays, y: mx.array, dx: mx.array) -> list[mx.array]:
        def entering(y: mx.array, *pictures: mx.array) -> list[mx.array]:
            return [self._passes.entering(index, with_pictures(batch, pictures), y)]

        return mx.vjp(entering, [y, *self._differentiated(batch)], [dx])[1]

    def _differentiated(self, batch: Arrays) -> list[mx.array]:
        """Return what the tower has made of the batch's pictures, if it trains."""
        return _pictures_of(batch) if self._passes.in_tower.paths else []

    def _tower(self, batch: Arrays, key: mx.array) -> tuple[list[mx.array], mx.array]:
        """Return what the tower makes of the pictures of a batch, and the next key."""
        seen, state = seen_by_tower(batch), [key]
        assert seen is not None
        model: Any = self._passes.model
        with undisturbed(model), drawing_with(state):
            features, deep = run_tower(model.vision_tower, TowerInputs(**seen))
        return [features, *deep], state[0]

    def _tower_again(self, batch: Arrays, key: mx.array, gradients: list[mx.array]) -> list[mx.array]:
        """Return the gradients of what trains in the tower."""

        def pictures(*trained: mx.array) -> list[mx.array]:
            with self._passes.in_tower.holding(trained):
                return self._tower(batch, key)[0]

        return mx.vjp(pictures, self._passes.in_tower.arrays, gradients)[1]

    def _before(self, batch: Arrays, key: mx.array) -> tuple[mx.array, mx.array, list[mx.array]]:
        """Return the hidden states before the layers, the next key, and what layers are given beside them."""
        self.recorded, key = self._passes.recorded(batch, key)
        return self.recorded.hidden, key, self.recorded.arrays

    def _before_again(self, batch: Arrays, key: mx.array, dx: mx.array) -> tuple[list[mx.array], list[mx.array]]:
        """Return the gradients of what trains outside the layers, and of what a tower that trains made of pictures."""
        outer = self._passes.outer.arrays

        def hidden(*differentiated: mx.array) -> list[mx.array]:
            with self._passes.outer.holding(differentiated[: len(outer)]):
                return [self._passes.recorded(with_pictures(batch, differentiated[len(outer) :]), key)[0].hidden]

        gradients = mx.vjp(hidden, [*outer, *self._differentiated(batch)], [dx])[1]
        return gradients[: len(outer)], gradients[len(outer) :]

    def _behind(self, batch: Arrays, x: mx.array, key: mx.array, sides: list[mx.array]) -> tuple[Any, ...]:
        """Return the sums of losses and weights, the figures, and the gradients of the mean loss.

        These are of the hidden states x behind the layers, of the layers' side outputs, and of what trains outside.
        """

        def mean(inputs: dict[str, Any]) -> tuple[mx.array, ...]:
            with self._passes.outer.holding(inputs["outer"]):
                total, weight, *figures = self._passes.loss_behind(self._passes.loss, batch, inputs["x"], key)
            quotient = total / weight_or_one(weight)
            if self._routers is not None:
                added, reported = self._routers.of(inputs["sides"], weight)
                quotient, figures = quotient + added, [mx.concatenate([*figures, reported], axis=1)]
            return quotient, total, weight, *figures

        inputs = {"x": x, "sides": sides, "outer": self._passes.outer.arrays}
        (_, total, weight, *figures), gradients = mx.value_and_grad(mean)(inputs)
        return total, weight, figures, gradients["x"], gradients.get("sides", []), gradients.get("outer", [])
