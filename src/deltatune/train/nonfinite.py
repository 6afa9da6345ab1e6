"""Names where a loss or gradient stopped being finite, by running the batch again, layer by layer and uncompiled."""

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

# A layer to watch: its name for a person, and the module.
Watched = tuple[str, nn.Module]


def cause(model: nn.Module, loss: LossFunction, batches: list[Batch], layers: list[Watched]) -> str:
    """What find() says of the first batch that it finds anything in, and where the rows of that batch came from."""
    for batch in batches:
        found = find(model, loss, batch, layers)
        if found is not None:
            return f"{found}; batch: {', '.join(source for row in batch.sources for source in row)}"
    return "no cause was found in this process's rows when they were run again"


def find(model: nn.Module, loss: LossFunction, batch: Batch, layers: list[Watched]) -> str | None:
    """One sentence about the first place that is not finite, or None where this batch has none.

    `layers` in forward order. Forward comes first: a layer's output, then the loss; then backward from the last layer:
    the gradient that reaches a layer's output; then the parameters' gradients.
    """
    frozen = [f"{name} is not finite" for name, leaf in leaves(model.parameters()) if not _finite(leaf)]
    if frozen:
        return f"before the step, the model's own tensor {frozen[0]}"
    seen: list[tuple[str, mx.array]] = []
    arrived: list[tuple[str, mx.array]] = []
    with _watching(layers, seen, arrived):
        total, _, gradients = mean_loss_and_gradients(model, loss, arrays(batch))
        mx.eval(total, gradients, [flag for _, flag in seen + arrived])
    for name, finite in seen:
        if not finite.item():
            return f"the output of {name} is the first that is not finite"
    if not _finite(total):
        return "every layer's output is finite, the loss is not"
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
    """Within it, `seen` collects whether each output is finite, `arrived` each output's gradient, in their order."""
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
