"""What a layer is: gated delta, attention, experts. Found by structure, never by model_type."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import mlx.nn as nn

from .errors import UserError

ENTRY_POINT = "gated_delta_update"


def holds_entry_point(cls: type) -> bool:
    """Whether the module of `cls`, or of a base of it, has a global named gated_delta_update."""
    return any(ENTRY_POINT in vars(module) for base in cls.__mro__ if (module := sys.modules.get(base.__module__)))


def is_gated_delta(module: nn.Module) -> bool:
    """A_log and dt_bias on a class whose module holds gated_delta_update: Mamba mixers have the first two only."""
    return "A_log" in module and "dt_bias" in module and holds_entry_point(type(module))


def gated_delta_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> gated-delta mixer, for every one in `model`."""
    return {path: module for path, module in model.named_modules() if is_gated_delta(module)}


def layer_kind(layer: nn.Module) -> str:
    """delta, mamba, attention or other, from what the layer holds, never from its model's name.

    Gated-delta mixers hold A_log and dt_bias in a class whose module (or a base's) knows `gated_delta_update`; Mamba
    mixers hold A_log, later ones both. Attention: what asks for keys or values of its own, or carries their projection.
    """
    modules = layer.modules()
    for module in modules:
        if "A_log" in module:
            return "delta" if is_gated_delta(module) else "mamba"
    names = {name for module in modules for name in module.children()}
    return "attention" if any(_is_key_projection(name) for name in names) else "other"


def _is_key_projection(name: str) -> bool:
    return name in ("k_proj", "wk", "qkv_proj", "query_key_value", "c_attn", "Wqkv") or name.startswith("kv_a_proj")


def layer_paths(model: nn.Module) -> list[str]:
    """The path of every layer of `model.layers`, in their order."""
    layers = getattr(model, "layers", None)
    if not layers:
        raise UserError(f"{type(model).__name__} has no `layers`: not a model whose layers can be chosen for training.")
    paths = {id(module): path for path, module in model.named_modules()}
    return [paths[id(layer)] for layer in layers if layer is not None]


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
