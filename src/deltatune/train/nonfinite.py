"""Finds where a loss or gradient stopped being finite, by running the batch again uncompiled and watching each layer.

The training loop calls it when it has met such a loss or gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..data import Batch
from .step import LossFunction, arrays, mean_loss_and_gradients
from .tree import leaves

# A layer to watch: its name in messages, and its module.
Watched = tuple[str, nn.Module]


def cause(model: nn.Module, loss: LossFunction, batches: list[Batch], layers: list[Watched]) -> str:
    """Describe the first place that is not finite in any of the batches, and where the rows of its batch come from."""
    for batch in batches:
        place = find(model, loss, batch, layers)
        if place is not None:
            return f"{place}; batch: {', '.join(source for row in batch.sources for source in row)}"
    return "no cause was found when the rows of this process were run again"


def find(model: nn.Module, loss: LossFunction, batch: Batch, layers: list[Watched]) -> str | None:
    """Describe the first place that is not finite; None if this batch has none.

    The search goes in the order of computation: parameters; outputs of layers; loss; from the last layer backward, the
    gradient that arrives at a layer's output; gradients of parameters.

    Args:
        model: The model, with the parameters from before the step.
        loss: The loss that is trained.
        batch: The batch to run again.
        layers: The layers, in forward order.
    """
    damaged = [name for name, leaf in leaves(model.parameters()) if not _finite(leaf)]
    if damaged:
        return f"before the step, the model's own tensor {damaged[0]} is not finite"
    seen: list[tuple[str, mx.array]] = []
    arrived: list[tuple[str, mx.array]] = []
    with _watching(layers, seen, arrived):
        total, _, gradients, *_ = mean_loss_and_gradients(model, loss, arrays(batch))
        mx.eval(total, gradients, [flag for _, flag in seen + arrived])
    for name, finite in seen:
        if not finite.item():
            return f"the output of {name} is the first that is not finite"
    if not _finite(total):
        return "every layer's output is finite, but the loss is not"
    for name, finite in arrived:
        if not finite.item():
            return f"going backward, the gradient that reaches the output of {name} is the first that is not finite"
    for name, leaf in reversed(leaves(gradients)):
        if not _finite(leaf):
            return f"the gradient of {name} is not finite"
    return None


def _finite(array: mx.array) -> bool:
    return not mx.issubdtype(array.dtype, mx.floating) or bool(mx.isfinite(array).all().item())


@contextmanager
def _watching(
    layers: list[Watched], seen: list[tuple[str, mx.array]], arrived: list[tuple[str, mx.array]]
) -> Iterator[None]:
    """Collect inside the `with` block whether outputs (`seen`) and their gradients (`arrived`) are finite, in order."""
    kinds = [type(module) for _, module in layers]
    for (name, module), kind in zip(layers, kinds, strict=True):
        module.__class__ = _probed(name, kind, seen, arrived)
    try:
        yield
    finally:
        for (_, module), kind in zip(layers, kinds, strict=True):
            module.__class__ = kind


def _probed(name: str, kind: type, seen: list[tuple[str, mx.array]], arrived: list[tuple[str, mx.array]]) -> type:
    @mx.custom_function
    def tap(output: mx.array) -> mx.array:
        return output

    @tap.vjp
    def note(primal: mx.array, cotangent: mx.array, _: Any) -> mx.array:
        arrived.append((name, mx.isfinite(cotangent).all()))
        return cotangent

    def watch(leaf: Any) -> Any:
        if not (isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)):
            return leaf
        seen.append((name, mx.isfinite(leaf).all()))
        return tap(leaf)

    def call(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        return tree_map(watch, kind.__call__(self, *arguments, **options))

    return type(kind.__name__, (kind,), {"__call__": call})
