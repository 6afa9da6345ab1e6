"""Whether the layers of a model really call deltatune: found out by tracing the model, not by comparing names."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..layers import gated_delta_layers
from . import recurrence


def reached(model: nn.Module) -> dict[str, bool]:
    """Path of every gated-delta layer -> whether a call of it arrives at a patched function.

    Traces model(tokens [1, 2]) and evaluates nothing.
    """
    layers = gated_delta_layers(model)
    if not layers:
        return {}
    with recurrence.trace() as calls:
        model(mx.array([[0, 1]]))
    callers = {identity for call in calls for identity in call}
    return {path: id(layer) in callers for path, layer in layers.items()}


def explain(path: str, layer: nn.Module) -> str:
    """What it means that this layer does not call deltatune, and what to do."""
    return (
        f"{path} ({type(layer).__module__}.{type(layer).__qualname__}) does not call deltatune's gated delta: "
        "it trains with whatever code it calls now, at that code's speed, memory and gradients. To hand it over, "
        "undo the replacement of gated_delta_update or of the layer's __call__ before deltatune's patches apply."
    )
