"""Finds the implementation that serves each layer of a model: gated delta, linear attention, attention and experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..layers import LayerInfo, describe, gated_delta_layers, logits_of, state_space_layers
from ..ops.operator.foresight import foreseen
from ..ops.tracing.dispatch import NotedCall
from . import callers
from .whole_rows import whole_rows


@dataclass(frozen=True)
class Serving:
    """The implementations of a model's layers in training, by the layer's path; "" where upstream's own code serves.

    Those of gated_delta and of linear_attention are listed by mixer, those of attention and of experts by decoder
    layer.
    """

    delta: dict[str, str] = field(default_factory=dict)
    attention: dict[str, str] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    linear: dict[str, str] = field(default_factory=dict)

    def by_operator(self) -> dict[str, dict[str, str]]:
        """The same by the operator's name, without operators that no layer has."""
        recurrent = {"gated delta": self.delta, "linear attention": self.linear}
        operators = recurrent | {"attention": self.attention, "experts": self.experts}
        return {name: layers for name, layers in operators.items() if layers}


def serving(model: nn.Module, rows: int = 1) -> Serving:
    """Trace `model` on two tokens and see which of its layers call a patched function, and their implementations.

    Nothing is evaluated, and nothing is asked of a model without gated-delta layers or mixers of Mamba-2. Kernels that
    are tried for so many rows of a batch serve the batch.
    """
    mixers, others = gated_delta_layers(model), state_space_layers(model)
    if not (mixers or others):
        return Serving()
    layers = _layers(model)
    attending = [layer for layer in layers if layer.kind == "attention"]
    routing = [layer for layer in layers if layer.experts]

    def noted() -> list[NotedCall]:
        with callers.noting() as calls, whole_rows():
            logits_of(model, mx.array([[0, 1]] * rows))
        return calls

    with foreseen(noted):
        calls = noted()
    names = {(call.operator, identity): call.implementation for call in calls for identity in call.callers}
    return Serving(
        {path: names.get(("gated delta", id(mixer)), "") for path, mixer in mixers.items()},
        {layer.path: names.get(("attention", id(layer.module)), "") for layer in attending},
        {layer.path: names.get(("experts", id(layer.module)), "") for layer in routing},
        {path: names.get(("linear attention", id(mixer)), "") for path, mixer in others.items()},
    )


def _layers(model: nn.Module) -> list[LayerInfo]:
    try:
        return describe(model)
    except UserError:
        return []  # A model without a list of layers has none that could be named.


def explain(path: str, layer: nn.Module) -> str:
    """The message for a layer that does not call deltatune: the consequence for training, and the remedy."""
    return (
        f"{path} ({type(layer).__module__}.{type(layer).__qualname__}) does not call deltatune's gated delta: "
        "it trains with whatever code it calls now, at that code's speed, memory and gradients. To let deltatune serve "
        "it, undo the replacement of gated_delta_update or of the layer's __call__ before deltatune's patches apply."
    )
