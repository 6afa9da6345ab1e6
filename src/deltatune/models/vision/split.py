"""Splits vision-language models of mlx-vlm into a backbone (tokens and images to hidden states) and a head.

The backbone runs upstream's modules in an order of its own (run_tower), so that the training step can be compiled. So
the two parts are compared with upstream's forward pass before training begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ...errors import UserError
from ...machine.host_memory import as_numpy
from ...ops.attention import attention
from ...ops.functional import undisturbed
from .inputs import Picture, VisionBatch, VisionSpec, padded_patches, single_frames, token_positions, vision_batch


class TowerInputs(NamedTuple):
    """The arrays of inputs.VisionBatch that the tower needs, as MLX arrays."""

    patches: mx.array
    cells: mx.array
    position_rows: mx.array
    position_weights: mx.array
    present: mx.array


def run_tower(tower: Any, inputs: TowerInputs) -> tuple[mx.array, list[mx.array]]:
    """Compute the features of I frames of P patches from arrays alone, so that it can be part of a compiled step.

    The modules are upstream's; only the order in which they are called is written here. Each frame is a row of a batch,
    so that no frame attends to another. Upstream runs all frames as one sequence and cuts it at lengths that it reads
    on the host. The result is the features [I*P/merge^2, D] in the order of frames and patches, and for each deeper
    layer of the tower its features of the same shape (deepstack).

    Source: mlx_vlm.models.qwen3_vl.vision.VisionModel, and Qwen3VLVisionModel in Hugging Face transformers.
    """
    frames, count, _ = inputs.patches.shape
    dtype = tower.patch_embed.proj.weight.dtype
    x = tower.patch_embed(inputs.patches.reshape(frames * count, -1).astype(dtype)).reshape(frames, count, -1)
    corners = tower.pos_embed(inputs.position_rows)
    x = x + (corners * inputs.position_weights[..., None].astype(corners.dtype)).sum(axis=0)
    rotation = _rotation(tower, inputs.cells)
    # Patches that fill a frame up are a segment of their own.
    segments = 1 - inputs.present.astype(mx.int32)
    deep = []
    for index, block in enumerate(tower.blocks):
        x = x + _attend(block.attn, block.norm1(x), rotation, segments)
        x = x + block.mlp(block.norm2(x))
        if index in tower.deepstack_visual_indexes:
            merger = tower.deepstack_merger_list[list(tower.deepstack_visual_indexes).index(index)]
            deep.append(merger(x.reshape(frames * count, -1)))
    return tower.merger(x.reshape(frames * count, -1)), deep


def _rotation(tower: Any, cells: mx.array) -> tuple[mx.array, mx.array]:
    """Cosines and sines [I, P, 1, head size]: half of the angles follow a patch's row, half its column."""
    rotary = tower.rotary_pos_emb
    frequencies = 1.0 / (rotary.theta ** (mx.arange(0, rotary.dim, 2, dtype=mx.float32) / rotary.dim))
    angles = (cells[..., None].astype(mx.float32) * frequencies).flatten(-2)
    angles = mx.concatenate([angles, angles], axis=-1)[:, :, None]
    return mx.cos(angles), mx.sin(angles)


def _attend(layer: nn.Module, x: mx.array, rotation: tuple[mx.array, mx.array], segments: mx.array) -> mx.array:
    frames, count, width = x.shape
    qkv = layer.qkv(x).reshape(frames, count, 3, layer.num_heads, -1)
    q, k = (_rotated(qkv[:, :, index], rotation) for index in (0, 1))
    heads = [x.transpose(0, 2, 1, 3) for x in (q, k, qkv[:, :, 2])]
    y = attention(*heads, scale=layer.scale, causal=False, segments=segments)
    return layer.proj(y.transpose(0, 2, 1, 3).reshape(frames, count, width))


def _rotated(x: mx.array, rotation: tuple[mx.array, mx.array]) -> mx.array:
    cos, sin = rotation
    first, second = mx.split(x, 2, axis=-1)
    return (x * cos + mx.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)


# The largest difference from upstream's logits, relative to the largest logit.
_TOLERANCE = {mx.float32: 1e-4}
_HALF_TOLERANCE = 5e-2
# The frames, rows and columns of the images in the comparison, in patches (rescaled to the model's merge size).
_COMPARED_SHAPES = ((1, 4, 6), (1, 6, 4), (2, 4, 4))


# A VisionBatch as MLX arrays, in a dictionary because mx.compile turns named tuples into plain ones. Keys:
# - "positions" and "feature_rows", as in VisionBatch;
# - for images, either "tower" (the fields of TowerInputs) or the tower's results, "features" and "deep";
# - "counted", the positions that count in the loss, where those are not all of them.
VisionArrays = dict[str, Any]


def has_vision(model: nn.Module) -> bool:
    """Whether `model` is one of mlx-vlm's, which hold a language model and a vision tower."""
    return isinstance(model.get("vision_tower"), nn.Module) and isinstance(model.get("language_model"), nn.Module)


def vision_spec(model: Any) -> VisionSpec:
    """Read the numbers of a vision tower that inputs depend on; UserError for one that is not of the kind of
    Qwen3-VL's.
    """
    tower = model.get("vision_tower")
    config = model.config
    parts = ("patch_embed", "pos_embed", "rotary_pos_emb", "blocks", "merger")
    missing = [name for name in parts if not hasattr(tower, name)]
    if missing:
        what = "it has no vision_tower" if tower is None else f"{type(tower).__module__} has no {', '.join(missing)}"
        raise UserError(
            f"{type(model).__module__}: this layer cannot be trained: the vision tower is not of the kind of Qwen3-VL "
            f"and Qwen3.5, the only one that deltatune trains on images ({what}). Leave images and videos out: if "
            "mlx-lm knows the model, it can be trained on text."
        )
    about = config.vision_config
    return VisionSpec(
        patch=about.patch_size,
        temporal=about.temporal_patch_size,
        merge=about.spatial_merge_size,
        side=int(about.num_position_embeddings**0.5),
        values=about.in_channels * about.temporal_patch_size * about.patch_size**2,
        image_token=config.image_token_id,
        video_token=config.video_token_id,
        start_token=config.vision_start_token_id,
        end_token=config.vision_end_token_id,
    )


def vision_arrays(batch: VisionBatch, tower: Callable[[VisionBatch], VisionArrays] | None = None) -> VisionArrays:
    """Turn a batch into the arrays that the backbone takes; a `tower` that does not train (FrozenTower) runs here."""
    arrays: VisionArrays = {"positions": mx.array(batch.positions), "feature_rows": mx.array(batch.feature_rows)}
    if tower is not None:
        arrays |= tower(batch)
    elif len(batch.patches):
        arrays["tower"] = {name: mx.array(getattr(batch, name)) for name in TowerInputs._fields}
    return arrays


def blank_images(model: Any, tokens: mx.array) -> VisionArrays:
    """Return arrays of arbitrary content for `tokens` [B, T]: every token has features, deeper ones too."""
    width = model.config.vision_config.out_hidden_size
    features = mx.ones((tokens.size, width))
    deep = [features] * len(model.vision_tower.deepstack_visual_indexes)
    rows = mx.arange(tokens.size).reshape(tokens.shape)
    positions = mx.zeros((3, *tokens.shape), mx.int32)
    return {"positions": positions, "feature_rows": rows, "features": features, "deep": deep}


class VisionSplit(NamedTuple):
    """The two parts of a model: head(backbone(tokens [B, T], images)) equals the model's logits.

    The backbone passes further keyword arguments, such as `cache`, on to the language model.
    """

    backbone: Callable[..., mx.array]
    head: nn.Module | Callable[[mx.array], mx.array]


def split_vision(model: Any, *, compare: bool = True) -> VisionSplit:
    """Split a model of mlx-vlm and compare its parts with upstream's forward pass. Call it while the patches are
    applied.

    Without `compare` nothing is computed, and weights that were loaded lazily are not read. UserError says by how much
    the parts differ from upstream's forward pass, or names a vision tower of an unknown kind.
    """
    language = model.language_model
    head = language.lm_head if "lm_head" in language else language.model.embed_tokens.as_linear

    def backbone(tokens: mx.array, images: VisionArrays, **more: Any) -> mx.array:
        hidden = language.model.embed_tokens(tokens)
        if "tower" in images or "features" in images:
            if "tower" in images:
                features, deep = run_tower(model.vision_tower, TowerInputs(**images["tower"]))
            else:
                features, deep = images["features"], images["deep"]
            has_feature = (images["feature_rows"] >= 0)[..., None]
            row = mx.maximum(images["feature_rows"], 0)
            hidden = mx.where(has_feature, features[row].astype(hidden.dtype), hidden)
            if deep:
                more["visual_pos_masks"] = has_feature[..., 0]
                more["deepstack_visual_embeds"] = [mx.where(has_feature, layer[row], 0) for layer in deep]
        return language.model(tokens, inputs_embeds=hidden, position_ids=images["positions"], **more)

    split = VisionSplit(backbone, head)
    if compare:
        _compare_with_upstream(model, split)
    return split


def _compare_with_upstream(model: Any, split: VisionSplit) -> None:
    """Compare both on a row of text and images of several shapes, calling upstream as its own generation does."""
    limit = _TOLERANCE.get(model.vision_tower.patch_embed.proj.weight.dtype, _HALF_TOLERANCE)
    difference = _difference(model, split)
    if not difference <= limit:
        raise UserError(
            f"{type(model).__module__}: on a small image, its logits differ by {difference:.1e} of their size between "
            f"mlx-vlm and deltatune, and rounding explains at most {limit:.0e}, so it cannot be trained on images. "
            "Install a version of mlx-vlm that deltatune knows."
        )


def _difference(model: Any, split: VisionSplit) -> float:
    """The largest difference of our logits from upstream's, divided by the largest logit."""
    spec = vision_spec(model)
    tokens, pictures = _example(spec)
    grids = [picture.grid for picture in pictures]
    batch = vision_batch([(tokens, token_positions(tokens, grids, spec), pictures)], len(tokens), spec)
    with undisturbed(model):
        # In training mode, dropout would make the two forward passes differ.
        model.eval()
        rows = mx.array(tokens[None])
        expected = model(
            rows,
            pixel_values=mx.array(np.concatenate([picture.patches for picture in pictures])),
            image_grid_thw=mx.array(grids),
        ).logits
        actual = split.head(split.backbone(rows, vision_arrays(batch)))
    expected, actual = expected.astype(mx.float32), actual.astype(mx.float32)
    return float(mx.abs(actual - expected).max() / mx.abs(expected).max())


def _example(spec: VisionSpec) -> tuple[np.ndarray, list[Picture]]:
    """A row of tokens with an image for each frame of each of _COMPARED_SHAPES, and the images."""
    random = np.random.default_rng(0)
    grids = single_frames([(f, r // 2 * spec.merge, c // 2 * spec.merge) for f, r, c in _COMPARED_SHAPES])
    pictures = [Picture(random.standard_normal((int(np.prod(grid)), spec.values), np.float32), grid) for grid in grids]
    tokens = [1]
    for picture in pictures:
        tokens += [spec.start_token, *([spec.image_token] * spec.tokens(picture.grid)), 1, 2]
    return np.array(tokens, np.int32), pictures


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
