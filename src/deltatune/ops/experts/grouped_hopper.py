"""The operands of a product of rows with their experts' matrices, and Hopper's own kernel for such products.

The kernel is in kernels/products/experts_hopper.h. Others, and those of grouped.py, take the same operands.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mlx.core as mx

from ...machine import backend, nvidia
from ..kernels.launch import HOPPER_WORDS, Kernel, Launch, Plan, Values
from ..products.quantized_product import unpacked


class Packed(NamedTuple):
    """The experts' matrices in 4 bits, as mx.quantize packs them in mode "affine", for Hopper's kernel alone.

    The words are [E, ..., columns / 8] uint32, the scales and biases [E, ..., columns / group_size].
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the unpacked matrices."""
        return *self.words.shape[:-1], self.words.shape[-1] * 8

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the unpacked matrices."""
        return self.scales.dtype

    def unpacked(self) -> mx.array:
        """Return the matrices."""
        stored: dict[str, Any] = {"group_size": self.group_size, "bits": 4, "mode": "affine"}
        return unpacked(self.words, self.scales, self.biases, **stored)


class GroupedProduct(NamedTuple):
    """onto + scale * (rows times their expert's matrix + the product of an adapter), [R, N].

    The rows [R, K] are sorted by expert, and `ends` [E] int32 has the index after each expert's last row. The weight is
    [E, N, K] if `transpose`, and else [E, K, N], and has the rows' dtype, as `onto` [R, N] has. The adapter has rows
    [R, r] and a factor [E, N, r] if `transpose`, and else [E, r, N], for Hopper's kernel alone.
    """

    rows: mx.array
    weight: mx.array | Packed
    ends: mx.array
    transpose: bool
    scale: mx.array | float = 1.0
    onto: mx.array | None = None
    adapter: tuple[mx.array, mx.array] | None = None

    @property
    def outputs(self) -> int:
        """The width N of the product."""
        return self.weight.shape[1 if self.transpose else 2]

    def arrays(self, scale: mx.array) -> dict[str, mx.array]:
        """Return the inputs that both kernels have, by name; `scale` is the scale as an array [1]."""
        inputs = {"rows": self.rows, "ends": self.ends, "scale": scale}
        if isinstance(self.weight, Packed):
            inputs |= {"weight": self.weight.words, "scales": self.weight.scales, "biases": self.weight.biases}
        else:
            inputs["weight"] = self.weight
        return inputs if self.onto is None else inputs | {"onto": self.onto}

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes that a kernel reads: the inputs and the outputs of a matrix, and the number of experts."""
        outputs = "weight_shape[1]" if self.transpose else "weight_shape[2]"
        if isinstance(self.weight, Packed) and not self.transpose:
            outputs += " * 8"
        return "rows_shape[1]", outputs, "ends_shape[0]"


# Sizes must be multiples of the first, and larger. Numbers of tiles have 16 bits.
_UNIT, _MOST_TILES = 64, 2**16 - 1
# The threads of a team.
_TEAM = 128
_DTYPES = (mx.bfloat16, mx.float16)
# Packed numbers are counted in 32 bits. Where an expert has many rows, they are unpacked too often within its products.
_GROUP_SIZES, _MOST_NUMBERS, _MOST_ROWS = (32, 64), 2**32, 256
PRODUCT = Kernel(
    name="expert_hopper_product",
    files=(*HOPPER_WORDS, "products/experts_hopper_matrix.h", "products/experts_hopper.h"),
    values=("In", "TEAMS", "COLUMNS", "BLOCKS", "RANK", "TRANSPOSED", "ADDED", "GROUP"),
    arrays=("rows", "weight", "scales", "biases", "ends", "scale", "onto", "low_rank", "factor", "out"),
    memory="HopperExpertMemory",
    memory_values=("In", "TEAMS", "COLUMNS", "(GROUP > 0)"),
    bounded=True,
)


class HopperTile(NamedTuple):
    """The tile of a block: how many teams multiply 64 rows each, and the columns."""

    teams: int
    columns: int

    @property
    def most_experts(self) -> int:
        """How many experts a block can have: each thread, of these teams and one that loads, counts one's tiles."""
        return _TEAM * (self.teams + 1)


# Two teams are a little faster than three, which can count more experts.
_FEW_TEAMS, _MANY_TEAMS = 2, 3
_WIDE, _NARROW = 256, 128
# Blocks of a launch to each multiprocessor, which run one after another there: one that is done with a block gets the
# next, for some are slower than others. More blocks start more often, which short sums feel.
_BLOCKS_EACH = 4


def supports(rows: mx.array, weight: mx.array | Packed) -> bool:
    """Whether the kernel can compute such a product: in bf16 or fp16 on Hopper, with sizes that are multiples of 64.

    Packed matrices must be in groups of a known size. They are unpacked to bf16 with few teams alone, where this is
    faster than unpacking all of them before.
    """
    if backend.device() != "cuda" or nvidia.generation() != nvidia.HOPPER or rows.dtype not in _DTYPES:
        return False
    experts, *sizes = weight.shape
    if isinstance(weight, Packed):
        few = experts <= HopperTile(_FEW_TEAMS, _WIDE).most_experts and math.prod(weight.shape) <= _MOST_NUMBERS
        few = few and rows.shape[0] <= _MOST_ROWS * experts
        if not few or weight.group_size not in _GROUP_SIZES or not rows.dtype == weight.dtype == mx.bfloat16:
            return False
    if experts > HopperTile(_MANY_TEAMS, _WIDE).most_experts or rows.shape[0] // _UNIT + experts > _MOST_TILES:
        return False
    return all(size % _UNIT == 0 and size > _UNIT for size in sizes)


def adds(rows: mx.array, low_rank: mx.array, factor: mx.array) -> bool:
    """Whether the kernel can also add the product of an adapter with these rows and this factor."""
    rank = low_rank.shape[-1]
    return low_rank.dtype == factor.dtype == rows.dtype and rank % 8 == 0 and rank <= _UNIT


def product_tile(outputs: int, experts: int) -> HopperTile:
    """Choose the tile of a product with so many outputs and experts."""
    few = HopperTile(_FEW_TEAMS, _WIDE if outputs > _NARROW else _NARROW)
    return few if experts <= few.most_experts else few._replace(teams=_MANY_TEAMS)


def product_launch(operands: GroupedProduct, scale: mx.array, tile: HopperTile) -> Launch:
    """Describe the launch of a product; `scale` is its scale as an array [1]."""
    rows, adapter, outputs = operands.rows, operands.adapter, operands.outputs
    inputs = operands.arrays(scale)
    if adapter is not None:
        inputs |= {"low_rank": adapter[0], "factor": adapter[1]}
    tiles = (rows.shape[0] // (_UNIT * tile.teams) + operands.ends.size) * -(-outputs // tile.columns)
    # Each computes every so manyth tile.
    blocks = _BLOCKS_EACH * nvidia.limits().multiprocessors
    values: Values = {"In": rows.dtype, "TEAMS": tile.teams, "COLUMNS": tile.columns, "BLOCKS": blocks}
    values |= {
        "RANK": 0 if adapter is None else adapter[0].shape[1],
        "TRANSPOSED": operands.transpose,
        "ADDED": operands.onto is not None,
        "GROUP": operands.weight.group_size if isinstance(operands.weight, Packed) else 0,
    }
    stand_ins = dict.fromkeys(("onto", "low_rank", "factor"), "rows")
    plan = Plan(
        outputs={"out": ((rows.shape[0], outputs), rows.dtype)},
        values=values,
        blocks=(min(blocks, tiles), 1, 1),
        groups=_TEAM // 32 * (tile.teams + 1),
        # A body reads none of those that a call lacks, but their types name those of its operands.
        written={name: other for name, other in stand_ins.items() if name not in inputs},
        sizes=operands.sizes,
    )
    return PRODUCT.launch(inputs, plan)
