"""Says what each layer hands from one piece of a row to the next, by the caches with which its model decodes."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from ..layers import LayerInfo
from ..ops.pieces import Carry


def carries(model: nn.Module, layers: Sequence[LayerInfo]) -> list[Carry | None]:
    """Return what each layer hands on; None for a layer that runs on whole rows only.

    mlx-lm reads every long prompt piece by piece through such caches. Layers of mlx-vlm take positions besides, and
    Mamba's layers and windows have caches of other kinds, so they run on whole rows.

    Args:
        model: The model.
        layers: Its layers, as describe() returns them.
    """
    if not type(model).__module__.startswith("mlx_lm."):
        return [None] * len(layers)
    caches = make_prompt_cache(model)
    return [_carry(layer, caches[layer.index]) for layer in layers]


def _carry(layer: LayerInfo, cache: object) -> Carry | None:
    if layer.kind == "delta" and type(cache) is ArraysCache:
        return Carry(len(cache.cache))
    if layer.kind != "attention" or type(cache) is not KVCache:
        return None
    # The patch of latent attention serves whole rows alone.
    latent = any(name.startswith("kv_a_proj") for module in layer.module.modules() for name in module.children())
    return Carry(packed=not latent)
