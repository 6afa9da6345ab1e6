"""Computes the features of a vision tower that does not train: once for each image, not once for each step.

The tower runs on one frame at a time. So the features of an image have the same bits in every batch, cached or not, and
a resumed run gives the bits of the run that was never interrupted.
"""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ...machine.host_memory import as_numpy
from .inputs import VisionBatch, padded_patches
from .split import TowerInputs, has_vision, run_tower, vision_spec

# The most main memory that cached features take in a run without a bound.
CACHE_BYTES = 2**30


def frozen_tower(model: Any, cache_bytes: int = CACHE_BYTES) -> FrozenTower | None:
    """The FrozenTower of a model with nothing to train in its vision tower, projector included; else None."""
    if not has_vision(model) or tree_flatten(model.vision_tower.trainable_parameters()):
        return None
    return FrozenTower(model, cache_bytes)


class FrozenTower:
    """Gives the features of a batch's images when it is called with the batch.

    The result is {"features": [I*P/merge^2, D], "deep": a list with such an array for each deeper layer (deepstack)}.
    Rows are in the order that the batch's `feature_rows` counts; rows of padding are zeros. The result is empty for a
    batch without images. Cached features take `cache_bytes` of main memory at most, and `cached_bytes` now.
    """

    def __init__(self, model: Any, cache_bytes: int = CACHE_BYTES) -> None:
        self._tower = model.vision_tower
        self._spec = vision_spec(model)
        self._cache: dict[bytes, np.ndarray] = {}
        self.cached_bytes = 0
        self._cache_bytes = cache_bytes
        # That of the features, which are kept as unsigned integers.
        self._dtype = mx.float32

    def __call__(self, batch: VisionBatch) -> dict[str, Any]:
        frames, size = batch.patches.shape[:2]
        per_frame = size // self._spec.merge**2
        # Frames that no token refers to are padding.
        rows = batch.feature_rows[batch.feature_rows >= 0]
        used = [int(index) for index in np.unique(rows // max(per_frame, 1))]
        if not used:
            return {}
        features = {index: self._cached_features(batch, index) for index in used}
        layers, _, width = features[used[0]].shape
        padded = np.zeros((layers, frames * per_frame, width), features[used[0]].dtype)
        for index, frame in features.items():
            padded[:, index * per_frame : index * per_frame + frame.shape[1]] = frame
        arrays = [mx.array(layer).view(self._dtype) for layer in padded]
        return {"features": arrays[0], "deep": arrays[1:]}

    def _cached_features(self, batch: VisionBatch, index: int) -> np.ndarray:
        """The features of one frame, [1 + deeper layers, P/merge^2, D], as unsigned integers of the same bits."""
        count = int(batch.present[index].sum())
        key = hashlib.blake2b(batch.patches[index, :count].tobytes() + batch.cells[index, :count].tobytes()).digest()
        if key in self._cache:
            return self._cache[key]
        size = padded_patches(count, self._spec)
        features = mx.stack(self.frame_features(batch, index, size))[:, : count // self._spec.merge**2]
        self._dtype = features.dtype
        bits = np.array(as_numpy(features.view(mx.uint32 if features.dtype.size == 4 else mx.uint16)))
        if self.cached_bytes + bits.nbytes <= self._cache_bytes:
            self._cache[key] = bits
            self.cached_bytes += bits.nbytes
        return bits

    def frame_features(self, batch: VisionBatch, index: int, size: int) -> list[mx.array]:
        """Run the tower, lazily, on one frame of a batch and `size` patches, padding included. The result is the
        features [size/merge^2, D], then those of each deeper layer.
        """
        frame = {"patches": batch.patches, "cells": batch.cells, "present": batch.present}
        inputs = {name: mx.array(array[index : index + 1, :size]) for name, array in frame.items()}
        inputs |= {
            name: mx.array(getattr(batch, name)[:, index : index + 1, :size])
            for name in ("position_rows", "position_weights")
        }
        features, deep = run_tower(self._tower, TowerInputs(**inputs))
        return [features, *deep]
