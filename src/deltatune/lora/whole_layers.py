"""Whether adapters sit on everything in the last layers and nowhere else: then no list of names has to say where.

mlx-vlm 0.7.10 puts adapters on experts when it is told a number of layers, and refuses them by name.
"""

from __future__ import annotations

import mlx.nn as nn

from .adapter import Adapter
from .convert import adapters
from .select import adapter_class, layer_paths
from .weights import is_switch


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


def adapts_experts(model: nn.Module) -> bool:
    """Whether any adapter sits on experts."""
    return any(isinstance(module, Adapter) and is_switch(module.linear) for module in adapters(model).values()
               if "linear" in module)  # fmt: skip
