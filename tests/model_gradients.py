"""Losses and gradients of whole models, and how far two sets of gradients differ."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def next_token_loss(logits: mx.array, rows: mx.array) -> mx.array:
    """The sum of the losses of all but the first token of each row, from the logits of all but the last."""
    return nn.losses.cross_entropy(logits.astype(mx.float32), rows[:, 1:]).sum()


def gradients(
    model: nn.Module, loss: Callable[..., mx.array], *arguments: mx.array
) -> tuple[float, dict[str, mx.array]]:
    """loss(model, *arguments), and its gradient for each trainable parameter."""
    value, tree = nn.value_and_grad(model, loss)(model, *arguments)
    mx.eval(value, tree)
    return value.item(), dict(tree_flatten(tree))


def relative_errors(expected: dict[str, mx.array], actual: dict[str, mx.array]) -> tuple[float, float]:
    """The norm of the difference over the norm of the gradient: of all tensors together, and of the worst tensor."""
    assert expected.keys() == actual.keys()
    pairs = [(_norm(expected[name] - actual[name]), _norm(expected[name])) for name in expected]
    total = math.hypot(*(d for d, _ in pairs)) / math.hypot(*(g for _, g in pairs))
    return total, max(d / g for d, g in pairs if g > 1e-9)


def _norm(array: mx.array) -> float:
    return mx.linalg.norm(array.astype(mx.float32).reshape(-1)).item()


def without_gradient(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`function` without a gradient: routers of older versions let gradients reach the indices of experts."""
    return lambda *arguments, **options: mx.stop_gradient(function(*arguments, **options))
