"""What the layers of a model are, found by structure."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.nn as nn

from ..lora.select import layer_kind, layer_paths
from ..patches import gated_delta_layers


@dataclass(frozen=True)
class LayerInfo:
    """Decoder layer `index` at `path` (`module`). kind: delta, attention, mamba or other (no mixing of tokens).

    `delta` is the path of its gated-delta mixer, if it has one; `experts` says whether it routes tokens to experts.
    """

    index: int
    path: str
    kind: str
    module: nn.Module
    experts: bool
    delta: str | None = None


def describe(model: nn.Module) -> list[LayerInfo]:
    """Every decoder layer of `model.layers`, in order. Raises UserError for a model without `layers`."""
    modules = dict(model.named_modules())
    mixers = list(gated_delta_layers(model))
    found = []
    for index, path in enumerate(layer_paths(model)):
        layer = modules[path]
        delta = next((mixer for mixer in mixers if mixer.startswith(f"{path}.")), None)
        found.append(LayerInfo(index, path, layer_kind(layer), layer, has_experts(layer), delta))
    return found


def has_experts(layer: nn.Module) -> bool:
    """Whether `layer` holds stacked expert weights: [experts, out, in] on a class that says how many experts."""
    return any(
        "weight" in module and module.weight.ndim == 3 and hasattr(type(module), "num_experts")
        for module in layer.modules()
    )
