"""Shared by the tests of every kind of adapter: random adapters, float64 references and mlx-lm's own layer."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from deltatune.ops.operator.measure import as_float64 as float64


def adapted(kind: Any, base: nn.Module, rank: int, scale: float, dropout: float = 0.0) -> Any:
    """An adapter with random factors and magnitudes, so that its update is not zero."""
    adapter = kind.from_base(base, rank=rank, scale=scale, dropout=dropout)
    adapter.lora_b = 0.2 * mx.random.normal(adapter.lora_b.shape)
    if "m" in adapter:
        adapter.m = adapter.m * mx.random.uniform(0.5, 1.5, adapter.m.shape)
    adapter.unfreeze_adapter()
    return adapter


def value_and_gradients(
    adapter: nn.Module, run: Callable[[mx.array], mx.array], x: mx.array, dy: mx.array
) -> dict[str, mx.array]:
    """y = run(x), which calls `adapter`, and the gradients of sum(y * dy) for x and the adapter's parameters."""

    def loss(parameters, x):
        adapter.update(parameters)
        y = run(x)
        return (y * dy).sum(), y

    parameters = adapter.trainable_parameters()
    (_, y), (gradients, dx) = mx.value_and_grad(loss, argnums=(0, 1))(parameters, x)
    adapter.update(parameters)
    return {"y": y, "x": dx, **dict(tree_flatten(gradients))}


def assert_agree(found: dict[str, mx.array], expected: dict[str, Any]) -> None:
    """Assert that the same arrays are in both, and agree within 2e-6 of each array's largest element."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        value = float64(value) if isinstance(value, mx.array) else value
        assert found[name].shape == value.shape, name
        assert np.abs(float64(found[name]) - value).max() <= 2e-6 * np.abs(value).max(), name
