"""Finds where a loss, gradient or probability stopped being finite, by running again uncompiled and watching layers.

It is called when such a number was met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ...data import Batch
from ...errors import NoResultError, NotFiniteError, UserError
from ...layers import LayerInfo, describe
from ...lora.adapter import Adapter
from ...lora.new_rows import GrownTable
from ...models.generate import Sampling, stream
from ...models.load import Loaded
from ...models.vision.split import has_vision
from ...ops.functional import is_finite, is_floating
from ...ops.watched_calls import calls_through
from ..batch_loss import LossFunction, arrays, mean_loss_and_gradients
from ..by_layer.layer_passes import LayerPasses
from ..by_layer.store import Store
from ..tree import leaves

# A layer to watch: its name in messages, and its module.
Watched = tuple[str, nn.Module]

_FLOAT16 = (
    "Numbers of float16 go up to 65,504: convert the model to bfloat16 or float32 (mlx_lm.convert --dtype bfloat16)."
)
_OTHER = "The weights are too large: leave the adapter out if there is one, or download or convert the model again."


def damage(model: nn.Module, weights: Store | None = None) -> str | None:
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


@dataclass
class FirstOutput:
    """Looks at outputs for the first that is not finite; `name` is that of its origin, None while all are finite."""

    name: str | None = None
    dtype: mx.Dtype | None = None

    def see(self, name: str, output: Any) -> Any:
        """Look at an output, or a leaf of one, which is returned."""
        if self.name is None and isinstance(output, mx.array) and is_floating(output):
            self.dtype = output.dtype
            if not is_finite(output):
                self.name = name
        return output

    def __str__(self) -> str:
        if self.name is None:
            return f"every layer's output is finite, in {_named(self.dtype)}, but what follows them is not"
        return f"the output of {self.name} is the first that is not finite, in {_named(self.dtype)}"

    @property
    def remedy(self) -> str:
        """The remedy, as a sentence."""
        return _FLOAT16 if self.dtype == mx.float16 else _OTHER


def _named(dtype: mx.Dtype | None) -> str:
    return str(dtype).removeprefix("mlx.core.")


def watched(layers: Sequence[LayerInfo]) -> list[Watched]:
    """Return layers with their names in messages."""
    return [(f"{layer.path} ({layer.kind})", layer.module) for layer in layers]


def first_output(layers: Sequence[Watched], forward: Callable[[], object]) -> FirstOutput:
    """Look at the outputs of `layers` while `forward` runs, which must not be differentiated or compiled."""
    first = FirstOutput()
    with _shown(layers, first.see), suppress(NotFiniteError):
        forward()
    return first


def _shown(layers: Sequence[Watched], look: Callable[[str, Any], Any]) -> AbstractContextManager[None]:
    """Within the context, `look` gets each leaf of the outputs of `layers`, by name, and returns what stands for it."""
    names = {id(module): name for name, module in layers}

    def around(layer: nn.Module, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return tree_map(partial(look, names[id(layer)]), call(*arguments, **options))

    return calls_through([module for _, module in layers], around)


@contextmanager
def explained(
    loaded: Loaded, weights: Store | None = None, again: Callable[[Sequence[int]], Iterator[Any]] | None = None
) -> Iterator[None]:
    """Let a NotFiniteError within the block become a NoResultError, which names the layer and its dtype.

    `again` generates one token behind a row of tokens, by default as behind a text.
    """
    try:
        yield
    except NotFiniteError as error:
        if description := damage(loaded.model, weights):
            raise UserError(description) from error
        again = again or (lambda row: stream(loaded, row, 1, Sampling()))
        tower = [("the vision tower", loaded.model.vision_tower)] if has_vision(loaded.model) else []
        layers = [*tower, *watched(describe(loaded.model))]
        first = FirstOutput()
        for row in error.rows:
            first = first_output(layers, partial(list, again(row)))
            if first.name is not None:
                break
        raise NoResultError(f"the model's probabilities are not finite: {first}. {first.remedy}") from error


def _name_without_adapter(model: nn.Module, name: str) -> str:
    """Return the name that a tensor has in the model without adapters, as its checkpoint knows it."""
    for path, module in model.named_modules():
        inner = module.base_name if isinstance(module, Adapter) else "base"
        if isinstance(module, Adapter | GrownTable) and name.startswith(f"{path}.{inner}."):
            return f"{path}.{name.removeprefix(f'{path}.{inner}.')}"
    return name


def cause(
    model: nn.Module, loss: LossFunction, batches: list[Batch], layers: list[Watched], passes: LayerPasses | None = None
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
    """Describe the first place of a batch that is not finite, with the parameters from before the step; else None.

    The search goes in the order of computation: outputs of layers; loss; from the last layer backward, the gradient
    that arrives at a layer's output; gradients of parameters. `passes` compute it where the weights are not all in
    memory.
    """
    seen: list[tuple[str, mx.array, mx.Dtype]] = []
    arrived: list[tuple[str, mx.array]] = []

    def watch(index: int, array: mx.array, *, backward: bool) -> None:
        finite = mx.isfinite(array).all()
        mx.eval(finite)
        if backward:
            arrived.append((layers[index][0], finite))
        else:
            seen.append((layers[index][0], finite, array.dtype))

    if passes is None:
        with _watching(layers, seen, arrived):
            total, _, gradients, *_ = mean_loss_and_gradients(model, loss, arrays(batch))
            mx.eval(total, gradients, [flag for _, flag, *_ in [*seen, *arrived]])
    else:
        inputs = arrays(batch), model.trainable_parameters(), mx.random.key(0)
        total, _, gradients, *_ = passes.gradients(*inputs, watch=watch)
    for name, finite, dtype in seen:
        if not finite.item():
            return str(FirstOutput(name, dtype))
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
    layers: list[Watched], seen: list[tuple[str, mx.array, mx.Dtype]], arrived: list[tuple[str, mx.array]]
) -> Iterator[None]:
    """Collect inside the `with` block whether outputs (`seen`) and their gradients (`arrived`) are finite, in order."""

    def watch(name: str, leaf: Any) -> Any:
        if not (isinstance(leaf, mx.array) and is_floating(leaf)):
            return leaf
        seen.append((name, mx.isfinite(leaf).all(), leaf.dtype))
        tap = mx.custom_function(lambda output: output)

        @tap.vjp
        def note(primal: mx.array, cotangent: mx.array, _: Any) -> mx.array:
            arrived.append((name, mx.isfinite(cotangent).all()))
            return cotangent

        return tap(leaf)

    with _shown(layers, watch):
        yield
