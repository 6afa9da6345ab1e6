"""Multiplies rows sorted by expert with their expert's matrix, on the tensor cores of an NVIDIA GPU.

MLX's own products of this kind do not use tensor cores while TF32 is off. These kernels serve bf16, with fp32 sums.
fp32 stays with MLX, since its products are exact, and so does fp16: the kernels would hold each number as a pair of
bf16 and make three products of one. Hopper has a kernel of its own for most products (grouped_hopper.py), in fp16 too.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ...machine import backend, nvidia
from ..kernels.launch import Kernel, Launch, Plan, Values, numbers
from . import grouped_hopper
from .grouped_hopper import GroupedProduct, HopperTile

# The groups of 32 lanes in a block.
_GROUPS = 4
# The rows, columns and depth of a block's tile, and how many groups divide its columns among them.
_WIDE, _FLAT, _NARROW = (128, 128, 64, 2), (64, 128, 32, 2), (64, 16, 128, 1)
_GRADIENT_WIDE, _GRADIENT_LOW, _GRADIENT_NARROW = (128, 128, 64, 2), (16, 128, 64, 4), (128, 16, 64, 1)
TileShape = tuple[int, int, int, int]
FILES = ("products/experts.h",)
_VALUES = ("In", "ROWS", "COLUMNS", "DEPTH", "GROUPS", "ACROSS")
PRODUCT = Kernel(
    name="expert_product",
    files=FILES,
    values=(*_VALUES, "TRANSPOSED", "ADDED"),
    arrays=("rows", "weight", "ends", "scale", "onto", "out"),
    memory="ExpertProductMemory",
    memory_values=("In", "ROWS", "COLUMNS", "DEPTH", "TRANSPOSED"),
)
GRADIENT = Kernel(
    name="expert_gradient",
    files=FILES,
    values=(*_VALUES, "ADDED"),
    sizes=("left_rows_shape[1]", "right_rows_shape[1]"),
    arrays=("left_rows", "right_rows", "ends", "scale", "total", "out"),
    memory="ExpertGradientMemory",
    memory_values=("In", "ROWS", "COLUMNS", "DEPTH"),
)


def supports(dtype: mx.Dtype, *sizes: int) -> bool:
    """Whether the kernels can compute such products: in bf16 on Hopper or newer, with all sizes multiples of 8."""
    if backend.device() != "cuda" or nvidia.generation() < nvidia.HOPPER:
        return False
    return dtype == mx.bfloat16 and all(size % 8 == 0 for size in sizes)


def product_tile(inputs: int, outputs: int) -> TileShape:
    """Choose the tile of a product: narrow for a LoRA factor A with its few outputs, flat for B with its few inputs."""
    if outputs <= _NARROW[1]:
        return _NARROW
    return _FLAT if inputs <= _FLAT[2] else _WIDE


def gradient_tile(height: int, width: int) -> TileShape:
    """Choose the tile of a gradient [E, height, width]."""
    if height <= _GRADIENT_LOW[0]:
        return _GRADIENT_LOW
    return _GRADIENT_NARROW if width <= _GRADIENT_NARROW[1] else _GRADIENT_WIDE


def product(operands: GroupedProduct, tile: TileShape | HopperTile | None = None) -> Launch:
    """Return the launch of a grouped product; its tile, which also names the kernel, is by default `product_tile`'s."""
    tile = tile or product_tile(operands.rows.shape[1], operands.outputs)
    scale, rows = _numbers(operands.scale), operands.rows
    if isinstance(tile, HopperTile):
        return grouped_hopper.product_launch(operands, scale, tile)
    assert operands.adapter is None, "only Hopper's kernel adds the product of an adapter"
    assert isinstance(operands.weight, mx.array), "only Hopper's kernel reads packed matrices"
    tile_rows, tile_columns, *_ = tile
    added = operands.onto is not None
    plan = Plan(
        outputs={"out": ((rows.shape[0], operands.outputs), rows.dtype)},
        values=_values(rows.dtype, tile) | {"TRANSPOSED": operands.transpose, "ADDED": added},
        # kernels/products/experts.h numbers the tiles of rows so that there may be this many.
        blocks=(-(-operands.outputs // tile_columns), rows.shape[0] // tile_rows + operands.ends.size, 1),
        groups=_GROUPS,
        written={} if added else {"onto": "rows"},
        sizes=operands.sizes,
    )
    return PRODUCT.launch(operands.arrays(scale), plan)


def gradient(
    total: mx.array | None,
    left: mx.array,
    right: mx.array,
    ends: mx.array,
    scale: mx.array | float = 1.0,
    tile: TileShape | None = None,
) -> Launch:
    """Return the launch of total + scale * left^T right over each expert's rows, [E, a, b] fp32.

    `left` [R, a] and `right` [R, b] are sorted by expert, and `ends` [E] int32 has the index after each expert's last
    row. A total of None stands for zeros; the tile is by default `gradient_tile`'s. The rows are added in their order
    and without atomics, so that every run gives the same bits.
    """
    tile = tile or gradient_tile(left.shape[1], right.shape[1])
    experts, height, width = ends.size, left.shape[1], right.shape[1]
    inputs = {"left_rows": left, "right_rows": right, "ends": ends, "scale": _numbers(scale)}
    if total is not None:
        inputs["total"] = total
    plan = Plan(
        outputs={"out": ((experts, height, width), mx.float32)},
        values=_values(left.dtype, tile) | {"ADDED": total is not None},
        blocks=(-(-width // tile[1]), -(-height // tile[0]), experts),
        groups=_GROUPS,
        written={} if total is not None else {"total": "scale"},
    )
    return GRADIENT.launch(inputs, plan)


def _values(dtype: mx.Dtype, tile: TileShape) -> Values:
    return dict(zip(_VALUES, (dtype, *tile[:3], _GROUPS, tile[3]), strict=True))


def _numbers(scale: mx.array | float) -> mx.array:
    return scale.reshape(1) if isinstance(scale, mx.array) else numbers(scale)


@cache
def number(value: float) -> mx.array:
    """Return an fp32 array [] of one number, computed once and shared by all callers."""
    # The CPU's stream does not wait for work queued on the GPU.
    with mx.stream(mx.cpu):
        first = numbers(value)[0]
        mx.eval(first)
    return first
