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

from ...data import Batch
from ...errors import UserError
from ...lora.adapter import Adapter
from ...lora.new_rows import GrownTable
from ...ops.functional import is_finite
from ..batch_loss import LossFunction, arrays, mean_loss_and_gradients
from ..by_layer.layer_passes import LayerPasses
from ..by_layer.layer_weights import LayerWeights
from ..tree import leaves

# A layer to watch: its name in messages, and its module.
Watched = tuple[str, nn.Module]


def damage(model: nn.Module, weights: LayerWeights | None = None) -> str | None:
    """Describe the tensors of `model` that are not finite, which no option and no data can mend; None if all are.

    `weights` reads those of the model's arrays that stay on the disk.
    Updates that are not finite are never made, so such a tensor comes from the checkpoint.
    """
    tensors = leaves(model.parameters())
    damaged = [name for name, leaf in tensors if not is_finite(weights.numbers(name, leaf) if weights else leaf)]
    if not damaged:
        return None
    return (
        f"{len(damaged):,} of the model's {len(tensors):,} tensors hold NaN or infinity, the first "
        f"{_name_without_adapter(model, damaged[0])}: its checkpoint is damaged. Download or convert it again."
    )


def refuse_damaged(model: nn.Module, weights: LayerWeights | None = None) -> None:
    """Raise a UserError with the description of the damage if a tensor of `model` is not finite."""
    description = damage(model, weights)
    if description is not None:
        raise UserError(description)


def refusal(what: str, saved: str) -> UserError:
    """Return the error of a step that is not finite: `what` it is and why, and what of the run is `saved`."""
    return UserError(
        f"{what}. The update was not made; {saved}. Look at those lines, lower --learning-rate or set grad_clip, and "
        "start again (--resume-adapter-file continues from saved adapters)."
    )


def trained_is_finite(model: nn.Module) -> bool:
    """Whether all that the model trains is finite, so that it is worth saving."""
    return all(is_finite(leaf) for _, leaf in leaves(model.trainable_parameters()))


def _name_without_adapter(model: nn.Module, name: str) -> str:
    """Return the name that a tensor has in the model without adapters, as its checkpoint knows it."""
    for path, module in model.named_modules():
        inner = module.base_name if isinstance(module, Adapter) else "base"
        if isinstance(module, Adapter | GrownTable) and name.startswith(f"{path}.{inner}."):
            return f"{path}.{name.removeprefix(f'{path}.{inner}.')}"
    return name


def cause(
    model: nn.Module,
    loss: LossFunction,
    batches: list[Batch],
    layers: list[Watched],
    passes: LayerPasses | None = None,
) -> str:
    """Describe the first place that is not finite in any of the batches, and where the rows of its batch come from."""
    for batch in batches:
        place = first_place(model, loss, batch, layers, passes)
        if place is not None:
            return f"{place}; batch: {', '.join(source for row in batch.sources for source in row)}"
    return "no cause was found when the rows of this process were run again"


def first_place(
    model: nn.Module, loss: LossFunction, batch: Batch, layers: list[Watched], passes: LayerPasses | None = None
) -> str | None:
    """Describe the first place that is not finite; None if this batch has none.

    The search goes in the order of computation: outputs of layers; loss; from the last layer backward, the
    gradient that arrives at a layer's output; gradients of parameters.

    Args:
        model: The model, with the parameters from before the step.
        loss: The loss that is trained.
        batch: The batch to run again.
        layers: The layers, in forward order.
        passes: Compute the batch, where the model's weights are not all in memory.
    """
    seen: list[tuple[str, mx.array]] = []
    arrived: list[tuple[str, mx.array]] = []

    def watch(index: int, array: mx.array, *, backward: bool) -> None:
        finite = mx.isfinite(array).all()
        mx.eval(finite)
        (arrived if backward else seen).append((layers[index][0], finite))

    if passes is None:
        with _watching(layers, seen, arrived):
            total, _, gradients, *_ = mean_loss_and_gradients(model, loss, arrays(batch))
            mx.eval(total, gradients, [flag for _, flag in seen + arrived])
    else:
        inputs = arrays(batch), model.trainable_parameters(), mx.random.key(0)
        total, _, gradients, *_ = passes.gradients(*inputs, watch=watch)
    for name, finite in seen:
        if not finite.item():
            return f"the output of {name} is the first that is not finite"
    if not is_finite(total):
        return "every layer's output is finite, but the loss is not"
    for name, finite in arrived:
        if not finite.item():
            return f"going backward, the gradient that reaches the output of {name} is the first that is not finite"
    for name, leaf in reversed(leaves(gradients)):
        if not is_finite(leaf):
            return f"the gradient of {name} is not finite"
    return None


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
