"""Folds a model's adapters into its weights."""

from __future__ import annotations

import mlx.nn as nn
from mlx.utils import tree_unflatten

from .convert import adapters


def merge(model: nn.Module, dequantize: bool = False) -> list[str]:
    """Replace every adapter of `model`, in place, by a module like its base; returns their paths.

    A quantised base is quantised again at its own width, which moves the weights, or left plain with `dequantize`.
    """
    fused = {path: adapter.fuse(dequantize=dequantize) for path, adapter in adapters(model).items()}
    if fused:
        model.update_modules(tree_unflatten(list(fused.items())))
    return list(fused)
