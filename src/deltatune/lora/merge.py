"""Merges a model's adapters into its weights, in memory (models/merged_checkpoint.py does it in files)."""

from __future__ import annotations

import mlx.nn as nn
from mlx.utils import tree_unflatten

from .convert import adapters


def merge(model: nn.Module, dequantize: bool = False) -> list[str]:
    """Replace every adapter of `model`, in place, by a module like its base that contains the adapter's update.

    Args:
        model: A model with adapters.
        dequantize: Whether a quantised base becomes a dense module. Otherwise it is quantised again, with the same
            settings, which rounds the update along with the weight.

    Returns:
        The paths of the replaced adapters.
    """
    fused = {path: adapter.fuse(dequantize=dequantize) for path, adapter in adapters(model).items()}
    if fused:
        model.update_modules(tree_unflatten(list(fused.items())))
    return list(fused)
