"""Qwen3-VL's vision tower from arrays alone: the modules are upstream's, the order of its forward pass is written here.

One frame is a row of a batch, so that frames do not see each other; upstream cuts one long sequence at host-side
lengths instead. Source: mlx_vlm.models.qwen3_vl.vision.VisionModel, Hugging Face's Qwen3VLVisionModel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn


class TowerInputs(NamedTuple):
    """vision_inputs.VisionBatch's arrays for the tower, as MLX arrays."""

    patches: mx.array
    cells: mx.array
    table: mx.array
    share: mx.array
    present: mx.array


def run_tower(tower: Any, inputs: TowerInputs) -> tuple[mx.array, list[mx.array]]:
    """Features [I*P/merge^2, D] in the order of frames and patches, and those that deeper layers add (deepstack)."""
    frames, count, _ = inputs.patches.shape
    dtype = tower.patch_embed.proj.weight.dtype
    x = tower.patch_embed(inputs.patches.reshape(frames * count, -1).astype(dtype)).reshape(frames, count, -1)
    known = tower.pos_embed(inputs.table)
    x = x + (known * inputs.share[..., None].astype(known.dtype)).sum(axis=0)
    turn = _angles(tower, inputs.cells)
    mask = inputs.present[:, None, None, :]
    deep = []
    for index, block in enumerate(tower.blocks):
        x = x + _attend(block.attn, block.norm1(x), turn, mask)
        x = x + block.mlp(block.norm2(x))
        if index in tower.deepstack_visual_indexes:
            merger = tower.deepstack_merger_list[list(tower.deepstack_visual_indexes).index(index)]
            deep.append(merger(x.reshape(frames * count, -1)))
    return tower.merger(x.reshape(frames * count, -1)), deep


def _angles(tower: Any, cells: mx.array) -> tuple[mx.array, mx.array]:
    """cos and sin [I,P,1,head]: half of the frequencies turn with the row, half with the column."""
    rotary = tower.rotary_pos_emb
    frequencies = 1.0 / (rotary.theta ** (mx.arange(0, rotary.dim, 2, dtype=mx.float32) / rotary.dim))
    angles = (cells[..., None].astype(mx.float32) * frequencies).flatten(-2)
    angles = mx.concatenate([angles, angles], axis=-1)[:, :, None]
    return mx.cos(angles), mx.sin(angles)


def _attend(attention: nn.Module, x: mx.array, turn: tuple[mx.array, mx.array], mask: mx.array) -> mx.array:
    frames, count, width = x.shape
    qkv = attention.qkv(x).reshape(frames, count, 3, attention.num_heads, -1)
    q, k = (_turned(qkv[:, :, index], turn) for index in (0, 1))
    heads = [each.transpose(0, 2, 1, 3) for each in (q, k, qkv[:, :, 2])]
    found = mx.fast.scaled_dot_product_attention(*heads, scale=attention.scale, mask=mask)
    return attention.proj(found.transpose(0, 2, 1, 3).reshape(frames, count, width))


def _turned(x: mx.array, turn: tuple[mx.array, mx.array]) -> mx.array:
    cos, sin = turn
    first, second = mx.split(x, 2, axis=-1)
    return (x * cos + mx.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)
