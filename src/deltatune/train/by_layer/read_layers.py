"""Serves the calls of layers, by whomever, with weights that are read for each call, as decoding needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...ops.functional import undisturbed
from .layer_calls import LayerCalls
from .layer_functions import array_places
from .layer_weights import LayerWeights


def reading_calls(layers: Sequence[nn.Module], weights: LayerWeights) -> LayerCalls:
    """Return the calls of `layers`; one that nobody else serves reads the layer's weights, and is computed."""
    count = len(layers)

    def read(index: int, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        layer = layers[index]
        with undisturbed(layer):
            arrays = next(weights.along([index, (index + 1) % count]))
            for (_, place), array in zip(array_places(layer), arrays, strict=True):
                place.array = array
            y = call(*arguments, **options)
            mx.eval(y)
        return y

    return LayerCalls(layers, read)
