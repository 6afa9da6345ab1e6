"""Tells whether a model's adapters cover its last layers completely, so that a file may give their number instead.

mlx-vlm 0.7.10 accepts adapters on experts when an adapter's configuration gives a number of layers, and refuses them
when it lists modules. train/setup.py and train/outputs.py ask.
"""

from __future__ import annotations

import mlx.nn as nn

from .convert import adapters
from .experts import LoRASwitchLinear
from .select import adapter_class, layer_paths


def whole_layers(model: nn.Module) -> int | None:
    """Return how many of the last layers have an adapter on every module that can take one.

    None where modules outside those layers have adapters too, or some module inside them has none.
    """
    adapter_paths = set(adapters(model))
    layers = layer_paths(model)
    adapted = [any(path.startswith(f"{layer}.") for path in adapter_paths) for layer in layers]
    count = sum(adapted)
    last = tuple(f"{layer}." for layer in layers[len(layers) - count :])
    if not count or not all(adapted[len(layers) - count :]) or not all(path.startswith(last) for path in adapter_paths):
        return None
    inside_adapters = tuple(f"{path}." for path in adapter_paths)
    for path, module in model.named_modules():
        without_adapter = path not in adapter_paths and not path.startswith(inside_adapters) and path.startswith(last)
        if without_adapter and "weight" in module and not isinstance(adapter_class(module, False), str):
            return None
    return count


def adapts_experts(model: nn.Module) -> bool:
    """Whether any of deltatune's adapters is on the experts of a mixture."""
    return any(isinstance(adapter, LoRASwitchLinear) for adapter in adapters(model).values())
