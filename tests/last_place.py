"""The effect of roundings on a model's results: the most that a test may ask of them."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

# Four layers round about this often between a weight and the logits. Roundings add up like the root of that.
ROUNDINGS = 250


def parameters_one_unit_off(model, seed: int) -> dict:
    """The model's parameters, each moved up or down by about one unit in its last place."""
    keys = iter(mx.random.split(mx.random.key(seed), 1000))

    def moved(array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        up = mx.random.bernoulli(0.5, array.shape, key=next(keys))
        return array * mx.where(up, 1 + 2.0**-23, 1 - 2.0**-23)

    return tree_map(moved, model.parameters())


def largest_move(model: Any, result: Callable[[], mx.array]) -> float:
    """How far the elements of `result()` move when the parameters move by a unit: the largest of eight draws."""
    held, first = model.parameters(), result()
    moves = []
    for seed in range(8):
        model.update(parameters_one_unit_off(model, seed))
        moves.append(float(mx.abs(result() - first).max()))
    model.update(held)
    return max(moves)


def largest_difference(model: Any, result: Callable[[], mx.array]) -> float:
    """How far the elements of `result()`, the model's logits, may be from those of a computation that rounds otherwise.

    A unit in the last place, up or down, is sqrt(12) times the root mean square of a rounding to the nearest number.
    """
    return largest_move(model, result) * (ROUNDINGS / 12) ** 0.5


def assert_same(expected: mx.array, model: Any, result: Callable[[], mx.array], most: float = 1e-4) -> None:
    """Assert that `result()`, the model's logits, differs from `expected` by rounding only, and by less than `most`."""
    found = float(mx.abs(result() - expected).max())
    assert found == 0 or found < min(most, largest_difference(model, result))
