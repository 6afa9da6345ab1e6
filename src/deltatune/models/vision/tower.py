"""Runs Qwen3-VL's vision tower on arrays alone, so that it can be part of a compiled step.

The modules are upstream's; only the order in which they are called is written here. Each frame is a row of a batch, so
that no frame attends to another. Upstream runs all frames as one sequence and cuts it at lengths that it reads on the
host.

Source: mlx_vlm.models.qwen3_vl.vision.VisionModel, and Qwen3VLVisionModel in Hugging Face transformers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...ops.attention import attention


class TowerInputs(NamedTuple):
    """The arrays of inputs.VisionBatch that the tower needs, as MLX arrays."""

    patches: mx.array
    cells: mx.array
    position_rows: mx.array
    position_weights: mx.array
    present: mx.array


def run_tower(tower: Any, inputs: TowerInputs) -> tuple[mx.array, list[mx.array]]:
    """Compute the features of I frames of P patches.

    Args:
        tower: The vision tower of an mlx-vlm model.
        inputs: The arrays of the frames.

    Returns:
        The features [I*P/merge^2, D] in the order of frames and patches, and for each deeper layer of the tower its
        features of the same shape (deepstack).
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
