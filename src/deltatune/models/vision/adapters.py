"""Which adapters mlx-vlm loads: it finds those on experts by a number of layers, and refuses them by name."""

from __future__ import annotations

import mlx.nn as nn

from ...layers import layer_paths
from ...lora.adapter import Adapter
from ...lora.convert import adapters
from ...lora.select import adapter_class
from ...lora.weights import is_switch
from .split import has_vision


def layers_for_mlx_vlm(model: nn.Module) -> int | None:
    """The number of layers by which mlx-vlm finds this model's adapters, where names would not do."""
    return whole_layers(model) if has_vision(model) and _adapts_experts(model) else None


def refused_by_mlx_vlm(model: nn.Module) -> list[str]:
    """A sentence where mlx-vlm will not load this model's adapter."""
    if not has_vision(model) or not _adapts_experts(model) or whole_layers(model) is not None:
        return []
    return [
        "mlx-vlm 0.7.10 loads adapters on experts only where all of the last layers' modules have one, and nothing "
        "else: it will not load this adapter. deltatune does; merge it for mlx-vlm."
    ]


def whole_layers(model: nn.Module) -> int | None:
    """How many of the last layers carry an adapter on every module that takes one; None where any other set does."""
    found = adapters(model)
    layers = layer_paths(model)
    inside = tuple(f"{path}." for path in found)
    adapted = [any(path.startswith(f"{layer}.") for path in found) for layer in layers]
    count = sum(adapted)
    last = tuple(f"{layer}." for layer in layers[len(layers) - count :])
    if not count or not all(adapted[len(layers) - count :]) or not all(path.startswith(last) for path in found):
        return None
    for path, module in model.named_modules():
        left = path not in found and not path.startswith(inside) and path.startswith(last)
        if left and "weight" in module and not isinstance(adapter_class(module, False), str):
            return None
    return count


def _adapts_experts(model: nn.Module) -> bool:
    """Whether any adapter sits on experts."""
    return any(isinstance(module, Adapter) and is_switch(module.linear) for module in adapters(model).values()
               if "linear" in module)  # fmt: skip
