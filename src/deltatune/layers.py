"""Recognises kinds of layers by their parameters and the code that computes them, never by the model's name."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .errors import UserError

# The functions of mlx-lm and mlx-vlm that compute the gated delta rule, Mamba-2's state-space duality, and Lightning
# attention.
ENTRY_POINT = "gated_delta_update"
STATE_SPACE = "ssm_update"
LIGHTNING = "recurrent_gla"


def is_gated_delta(module: nn.Module) -> bool:
    """Whether a module is a gated-delta mixer.

    It holds the parameters A_log and dt_bias, as Mamba's mixers do too, and the Python module of its class or of a base
    has a global named gated_delta_update, as theirs do not.
    """
    return _is_recurrent(module, ENTRY_POINT)


def is_state_space(module: nn.Module) -> bool:
    """Whether a module is a mixer of Mamba-2, which calls ssm_update; Mamba's first kind has a loop of its own."""
    return _is_recurrent(module, STATE_SPACE)


def _is_recurrent(module: nn.Module, name: str) -> bool:
    sources = (sys.modules.get(base.__module__) for base in type(module).__mro__)
    return {"A_log", "dt_bias"} <= module.keys() and any(name in vars(source) for source in sources if source)


def gated_delta_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return every gated-delta mixer in `model`, by its path."""
    return {path: module for path, module in model.named_modules() if is_gated_delta(module)}


def state_space_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return every mixer of Mamba-2 in `model`, by its path."""
    return {path: module for path, module in model.named_modules() if is_state_space(module)}


def layer_kind(layer: nn.Module) -> str:
    """Return "delta", "mamba", "attention" or "other", for a decoder layer.

    A recurrent mixer holds the parameter A_log, and is Mamba's unless it is gated delta. An attention layer holds a
    projection to keys.
    """
    return _kind(layer.named_modules())


def _kind(named: list[tuple[str, nn.Module]]) -> str:
    for _, module in named:
        if "A_log" in module:
            return "delta" if is_gated_delta(module) else "mamba"
    keys = ("k_proj", "wk", "qkv_proj", "query_key_value", "c_attn", "Wqkv")
    names = {name for path, _ in named for name in path.split(".")}
    return "attention" if any(name in keys or name.startswith("kv_a_proj") for name in names) else "other"


def layer_paths(model: nn.Module) -> list[str]:
    """Return the path of every layer in `model.layers`, in order; UserError for a model without `layers`."""
    layers = getattr(model, "layers", None)
    if not layers:
        raise UserError(f"{type(model).__name__} has no `layers`: not a model whose layers can be chosen for training.")
    paths = {id(module): path for path, module in model.named_modules()}
    return [paths[id(layer)] for layer in layers if layer is not None]


def without_pictures(model: nn.Module) -> dict[str, None]:
    """Return the arguments that a model of mlx-vlm requires for a text without pictures: those without a default."""
    required = [p for p in inspect.signature(type(model).__call__).parameters.values() if p.default is p.empty]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # The first two are the model itself and its tokens.
    return {parameter.name: None for parameter in required[2:] if parameter.kind in kinds}


def logits_of(model: nn.Module, tokens: mx.array, **keywords: Any) -> mx.array:
    """Call a model on token ids [B, T], and return its logits [B, T, vocabulary].

    mlx-vlm's models may require pictures, for which None stands unless `keywords` have them, and answer with an object.
    """
    output = model(tokens, **{**without_pictures(model), **keywords})
    return output if isinstance(output, mx.array) else output.logits


@dataclass(frozen=True)
class LayerInfo:
    """The place and the properties of a decoder layer."""

    # The position in `model.layers`.
    index: int
    path: str
    # "delta", "attention", "mamba" or "other", as from layer_kind.
    kind: str
    module: nn.Module
    # Whether the layer routes tokens to experts.
    experts: bool
    # The path of its gated-delta mixer, if it has one.
    delta: str | None = None


def describe(model: nn.Module) -> list[LayerInfo]:
    """Describe every decoder layer of `model.layers`, in order; UserError for a model without `layers`."""
    paths = layer_paths(model)
    layers = []
    for index, (path, layer) in enumerate(zip(paths, [one for one in model.layers if one is not None], strict=True)):
        # MLX takes long to find a module's parts.
        named = layer.named_modules()
        delta = next((f"{path}.{mixer}" for mixer, module in named if mixer and is_gated_delta(module)), None)
        layers.append(LayerInfo(index, path, _kind(named), layer, any(_has_experts(part) for _, part in named), delta))
    return layers


def _has_experts(module: nn.Module) -> bool:
    """Whether a module holds experts: a weight [experts, out, in] in a class that has the attribute num_experts."""
    return "weight" in module and module.weight.ndim == 3 and hasattr(type(module), "num_experts")
