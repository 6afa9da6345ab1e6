"""Features of a tower that does not train: each image is looked at by itself, and once, not once a step.

An image by itself gives the same bits in whatever batch it stands and whether it was looked at before, so that a
resumed run goes on bit for bit.
"""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .inputs import VisionBatch, padded_patches
from .split import has_vision, vision_spec
from .tower import TowerInputs, run_tower

# Of features kept, in main memory; images beyond that are looked at anew each time.
CACHE_BYTES = 2**30


def frozen_tower(model: Any) -> FrozenTower | None:
    """Of a model with a vision tower of which nothing trains, projector included; else None."""
    if not has_vision(model) or tree_flatten(model.vision_tower.trainable_parameters()):
        return None
    return FrozenTower(model)


class FrozenTower:
    """Called with a batch: {"features": [I*P/merge^2, D], "deep": the same for each deeper layer (deepstack)}.

    Rows as the batch's `feature` counts them; those of padding are zeros. Empty for a batch without images.
    """

    def __init__(self, model: Any) -> None:
        self._tower, self._spec = model.vision_tower, vision_spec(model)
        self._cache: dict[bytes, np.ndarray] = {}
        self._bytes = 0

    def __call__(self, batch: VisionBatch) -> dict[str, Any]:
        frames, size = batch.patches.shape[:2]
        per_frame = size // self._spec.merge**2
        # Frames that no token asks for are padding.
        rows = batch.feature[batch.feature >= 0]
        found = {int(index): self._features(batch, int(index)) for index in np.unique(rows // max(per_frame, 1))}
        if not found:
            return {}
        kinds, _, width = next(iter(found.values())).shape
        whole = np.zeros((kinds, frames * per_frame, width), next(iter(found.values())).dtype)
        for index, each in found.items():
            whole[:, index * per_frame : index * per_frame + each.shape[1]] = each
        arrays = [mx.array(kind).view(self._dtype) for kind in whole]
        return {"features": arrays[0], "deep": arrays[1:]}

    def _features(self, batch: VisionBatch, index: int) -> np.ndarray:
        """[1 + deeper layers, P/merge^2, D] of one frame, its bits as integers."""
        count = int(batch.present[index].sum())
        key = hashlib.blake2b(batch.patches[index, :count].tobytes() + batch.cells[index, :count].tobytes()).digest()
        if key in self._cache:
            return self._cache[key]
        size = padded_patches(count, self._spec)
        found = mx.stack(self.look(batch, index, size))[:, : count // self._spec.merge**2]
        self._dtype = found.dtype
        bits = np.array(found.view(mx.uint32 if found.dtype.size == 4 else mx.uint16))
        if self._bytes + bits.nbytes <= CACHE_BYTES:
            self._cache[key] = bits
            self._bytes += bits.nbytes
        return bits

    def look(self, batch: VisionBatch, index: int, size: int) -> list[mx.array]:
        """Features of the frame `index`, of `size` patches with padding, and of deeper layers; lazily."""
        frame = {"patches": batch.patches, "cells": batch.cells, "present": batch.present}
        inputs = {name: mx.array(array[index : index + 1, :size]) for name, array in frame.items()}
        inputs |= {name: mx.array(getattr(batch, name)[:, index : index + 1, :size]) for name in ("table", "share")}
        features, deep = run_tower(self._tower, TowerInputs(**inputs))
        return [features, *deep]
