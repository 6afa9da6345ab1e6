"""Losses and gradients of whole models, and how far two sets of gradients differ."""

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

# Four layers round about this often between a weight and the loss and back. Roundings add up like the root of that.
ROUNDINGS = 500
# So many random changes of the parameters tell the size of one rounding.
DRAWS = 4


def next_token_loss(logits: mx.array, rows: mx.array) -> mx.array:
    """The sum of the losses of all but the first token of each row, from the logits of all but the last."""
    return nn.losses.cross_entropy(logits.astype(mx.float32), rows[:, 1:]).sum()


def tokens(batch: int, length: int, seed: int = 0) -> mx.array:
    """Rows [batch, length] of tokens that are neither special nor images."""
    return mx.random.randint(7, 320, (batch, length), key=mx.random.key(seed))


def losses(model: nn.Module, rows: mx.array) -> mx.array:
    """next_token_loss of a model of mlx-lm or of mlx-vlm."""
    logits = model(rows[:, :-1])
    return next_token_loss(getattr(logits, "logits", logits), rows)


def gradients(
    model: nn.Module, loss: Callable[..., mx.array], *arguments: mx.array
) -> tuple[float, dict[str, mx.array]]:
    """loss(model, *arguments), and its gradient for each trainable parameter."""
    value, tree = nn.value_and_grad(model, loss)(model, *arguments)
    mx.eval(value, tree)
    return value.item(), dict(tree_flatten(tree))


def relative_errors(expected: dict[str, mx.array], actual: dict[str, mx.array]) -> tuple[float, float]:
    """The norm of the difference over the norm of the gradient: of all tensors together, and of the worst tensor."""
    differences, sizes = difference_norms(expected, actual), _norms(expected)
    total = math.hypot(*differences.values()) / math.hypot(*sizes.values())
    return total, max(differences[name] / size for name, size in sizes.items() if size > 1e-9)


def difference_norms(expected: dict[str, mx.array], actual: dict[str, mx.array]) -> dict[str, float]:
    """The norm of the difference of each tensor."""
    assert expected.keys() == actual.keys()
    return _norms({name: array - actual[name] for name, array in expected.items()})


def rounding_bound(
    model: nn.Module, gradients_of_model: Callable[[], dict[str, mx.array]], expected: dict[str, mx.array]
) -> float:
    """How far two gradients may differ that round differently, over the norm of the gradient of all tensors."""
    bounds = rounding_bounds(model, gradients_of_model, expected)
    return math.hypot(*bounds.values()) / math.hypot(*_norms(expected).values())


def rounding_bounds(
    model: nn.Module, gradients_of_model: Callable[[], dict[str, mx.array]], expected: dict[str, mx.array]
) -> dict[str, float]:
    """The largest norm, for each tensor, of the difference of two gradients that round differently.

    The change of the gradients with every parameter changed by up to 2**-20 of itself shows the effect of one rounding.
    It is far above the rounding of either run, so that it belongs to the model and not to this machine. One draw may
    change a tensor of few numbers thirty times less than another does, so it is the root mean square of DRAWS.
    """
    parameters = {name: array for name, array in tree_flatten(model.parameters()) if array.dtype == mx.float32}
    drawn = np.random.default_rng(1)
    squares = dict.fromkeys(expected, 0.0)
    for _ in range(DRAWS):
        changed = {
            name: array * mx.array((1 + 2**-20 * drawn.uniform(-1, 1, array.shape)).astype(np.float32))
            for name, array in parameters.items()
        }
        model.load_weights(list(changed.items()), strict=False)
        for name, norm in difference_norms(expected, gradients_of_model()).items():
            squares[name] += norm**2 / DRAWS
    model.load_weights(list(parameters.items()), strict=False)
    return {name: (square * ROUNDINGS) ** 0.5 * 2**-4 for name, square in squares.items()}


def _norms(arrays: dict[str, mx.array]) -> dict[str, float]:
    return {name: mx.linalg.norm(array.astype(mx.float32).reshape(-1)).item() for name, array in arrays.items()}


def without_gradient(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`function` without a gradient: routers of mlx-vlm before 0.7.5 let gradients reach the indices of experts."""
    return lambda *arguments, **options: mx.stop_gradient(function(*arguments, **options))
