"""Serves the calls of layers, by whomever, with weights that are read for each call, as decoding needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ...models.layer_caches import kept_by_recurrence
from ...ops.functional import undisturbed
from .layer_calls import LayerCalls
from .layer_functions import array_places


class ReadsLayers(Protocol):
    """Hands out the arrays of layers, as LayerWeights does."""

    def along(self, order: Sequence[int]) -> Iterator[list[mx.array]]:
        """Yield the arrays of the layers in `order`, as array_places() lists them."""

    def stays(self, index: int) -> bool:
        """Whether the layer at a position may be computed while the next one is begun."""


def reading_calls(
    layers: Sequence[nn.Module], weights: ReadsLayers, compute: Callable[..., None] = mx.eval
) -> LayerCalls:
    """Return the calls of `layers`; one that nobody else serves reads the layer's weights, and is computed.

    Weights are put where the layers have them now, also while adapters around them are taken away. `compute` computes a
    layer's output before the next one begins; a plan only notes it.
    """
    count = len(layers)
    places = [[place for _, place in array_places(layer)] for layer in layers]

    def read(index: int, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        layer = layers[index]
        with undisturbed(layer):
            arrays = next(weights.along([index, (index + 1) % count]))
            for place, array in zip(places[index], arrays, strict=True):
                place.array = array
            y = call(*arguments, **options)
            compute(y, kept_by_recurrence([*arguments, *options.values()]))
        return y

    return LayerCalls(layers, read)
