"""Checks whether the gated-delta layers of a model really call deltatune.

The model is traced: comparing the names of functions would miss a layer that holds another function.
"""

from __future__ import annotations

import inspect

import mlx.core as mx
import mlx.nn as nn

from ..layers import gated_delta_layers
from . import recurrence


def reached(model: nn.Module) -> dict[str, str]:
    """Trace `model` on two tokens and see which of its gated-delta layers call a patched function, and what serves it.

    Args:
        model: A model that can be called with tokens [1, 2] and no image. Nothing is evaluated.

    Returns:
        {path of a gated-delta layer: the implementation of gated_delta that serves it in training; "" for a layer
        whose calls do not arrive at a patched function}.
    """
    layers = gated_delta_layers(model)
    if not layers:
        return {}
    with recurrence.noting_callers() as calls:
        model(mx.array([[0, 1]]), **_absent(type(model)))
    serving = {identity: implementation for callers, implementation in calls for identity in callers}
    return {path: serving.get(id(layer), "") for path, layer in layers.items()}


def _absent(model_class: type[nn.Module]) -> dict[str, None]:
    """None for what a model requires beside the tokens: some of mlx-vlm's require pixel values, and text has none."""
    _, _, *others = inspect.signature(model_class.__call__).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: None for each in others if each.default is each.empty and each.kind in named}


def explain(path: str, layer: nn.Module) -> str:
    """The message for a layer that does not call deltatune: what that means for training, and what to do."""
    return (
        f"{path} ({type(layer).__module__}.{type(layer).__qualname__}) does not call deltatune's gated delta: "
        "it trains with whatever code it calls now, at that code's speed, memory and gradients. To let deltatune serve "
        "it, undo the replacement of gated_delta_update or of the layer's __call__ before deltatune's patches apply."
    )
