"""Says whether mlx-vlm can load an adapter on layers of experts, and with which settings.

mlx-vlm loads such adapters only by a number of layers at the end of the model, never by the names of modules.
"""

from __future__ import annotations

import mlx.nn as nn

from ...layers import layer_paths
from ...lora.adapter import Adapter
from ...lora.convert import adapters
from ...lora.select import adapter_class
from ...lora.weights import is_switch
from .split import has_vision


def layers_for_mlx_vlm(model: nn.Module) -> int | None:
    """The number of layers that mlx-vlm needs to load this model's adapters, or None where names are enough."""
    return _completely_adapted_layers(model) if _is_loaded_by_number(model) else None


def refused_by_mlx_vlm(model: nn.Module) -> list[str]:
    """A list with a message if mlx-vlm cannot load this model's adapter, else an empty list."""
    if not _is_loaded_by_number(model) or _completely_adapted_layers(model) is not None:
        return []
    return [
        "mlx-vlm 0.7.10 loads adapters on experts only if every module of the last layers has one and no other module "
        "does, so it cannot load this adapter. deltatune can; to use the model with mlx-vlm, merge the adapter."
    ]


def _is_loaded_by_number(model: nn.Module) -> bool:
    switches = [isinstance(adapter, Adapter) and is_switch(adapter.base) for adapter in adapters(model).values()]
    return has_vision(model) and any(switches)


def _completely_adapted_layers(model: nn.Module) -> int | None:
    """How many of the last layers are adapted completely: every module that can take an adapter has one.

    None if any other module has an adapter, or one of those modules has none.
    """
    adapted = adapters(model)
    layers = layer_paths(model)
    inside_adapters = tuple(f"{path}." for path in adapted)
    is_adapted = [any(path.startswith(f"{layer}.") for path in adapted) for layer in layers]
    count = sum(is_adapted)
    last = tuple(f"{layer}." for layer in layers[len(layers) - count :])
    if not count or not all(is_adapted[len(layers) - count :]) or not all(path.startswith(last) for path in adapted):
        return None
    for path, module in model.named_modules():
        unadapted = path not in adapted and not path.startswith(inside_adapters) and path.startswith(last)
        if unadapted and "weight" in module and not isinstance(adapter_class(module, False), str):
            return None
    return count
