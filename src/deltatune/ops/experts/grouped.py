"""Products of rows sorted by expert on an NVIDIA GPU's tensor cores, where MLX's take none with TF32 off.

For bf16, with fp32 sums. fp32 stays with MLX's own products, which are exact there, and so does fp16: the kernels would
hold it as pairs of bf16, at three products for one.
"""

from __future__ import annotations

from functools import cache, lru_cache

import mlx.core as mx

from ...machine import backend, nvidia
from ..kernels.launch import Launch, numbers

_GROUPS, _ARRIVALS = 4, 16
# Rows, columns and depth of a block's tile, and how many groups stand side by side in it.
_WIDE, _FLAT, _NARROW = (128, 128, 64, 2), (64, 128, 32, 2), (64, 16, 128, 1)
_GRADIENT_WIDE, _GRADIENT_LOW, _GRADIENT_NARROW = (128, 128, 64, 2), (16, 128, 64, 4), (128, 16, 64, 1)
Cut = tuple[int, int, int, int]


def takes(dtype: mx.Dtype, *sizes: int) -> bool:
    """Whether the kernels here are for such products: on Hopper or newer, in bf16, sizes in pieces of 16 bytes."""
    if backend.device() != "cuda" or nvidia.generation() < nvidia.HOPPER:
        return False
    return dtype == mx.bfloat16 and all(size % 8 == 0 for size in sizes)


def product_cut(inputs: int, outputs: int) -> Cut:
    """The tile of a product: narrow for LoRA's A, with as many outputs as the rank; flat for B, with as many inputs."""
    if outputs <= _NARROW[1]:
        return _NARROW
    return _FLAT if inputs <= _FLAT[2] else _WIDE


def gradient_cut(height: int, width: int) -> Cut:
    """The tile of a gradient [E, height, width]."""
    if height <= _GRADIENT_LOW[0]:
        return _GRADIENT_LOW
    return _GRADIENT_NARROW if width <= _GRADIENT_NARROW[1] else _GRADIENT_WIDE


def product(
    rows: mx.array,
    weight: mx.array,
    ends: mx.array,
    transpose: bool,
    scale: mx.array | float = 1.0,
    onto: mx.array | None = None,
) -> mx.array:
    """onto + scale * rows [R, K] times their expert's matrix (`weight` [E, N, K], transposed, or [E, K, N]): [R, N].

    `ends` [E] int32 counts the rows of the experts up to each. All of one dtype, `scale` fp32 (one number).
    """
    cut = product_cut(rows.shape[1], weight.shape[1 if transpose else 2])
    return product_launch(rows, weight, ends, transpose, scale, onto, cut).run()[0]


def gradient(
    total: mx.array | None, left: mx.array, right: mx.array, ends: mx.array, scale: mx.array | float = 1.0
) -> mx.array:
    """total [E, a, b] fp32 plus scale times, for each expert, the sum over its rows of left [R, a] times right [R, b].

    Rows are added in their order, with no atomic sums: the same bits in every run.
    """
    return gradient_launch(total, left, right, ends, scale, gradient_cut(left.shape[1], right.shape[1])).run()[0]


def product_launch(
    rows: mx.array,
    weight: mx.array,
    ends: mx.array,
    transpose: bool,
    scale: mx.array | float,
    onto: mx.array | None,
    cut: Cut,
) -> Launch:
    tall, wide, deep, _ = cut
    outputs = weight.shape[1 if transpose else 2]
    inputs = {"rows": rows, "weight": weight, "ends": ends, "scale": _numbers(scale)}
    if onto is not None:
        inputs["onto"] = onto
    return Launch(
        name="expert_product",
        memory="ExpertProductMemory",
        inputs=inputs,
        outputs={"out": ((rows.shape[0], outputs), rows.dtype)},
        values=_values(rows.dtype, cut) | {"TRANSPOSED": transpose, "ADDED": onto is not None},
        order=(*_ORDER, "TRANSPOSED", "ADDED"),
        memory_order=("In", "ROWS", "COLUMNS", "DEPTH", "TRANSPOSED"),
        # As many numbers of tiles of rows as kernels/expert_product.h gives out.
        blocks=(-(-outputs // wide), rows.shape[0] // tall + ends.size, 1),
        bytes=product_bytes(rows.dtype.size, tall, wide, deep, transpose),
        groups=_GROUPS,
        arguments=("rows", "weight", "ends", "scale", "rows" if onto is None else "onto", "out"),
        sizes=("rows_shape[1]", f"weight_shape[{1 if transpose else 2}]", "ends_shape[0]"),
    )


def gradient_launch(
    total: mx.array | None, left: mx.array, right: mx.array, ends: mx.array, scale: mx.array | float, cut: Cut
) -> Launch:
    tall, wide, deep, _ = cut
    experts, height, width = ends.size, left.shape[1], right.shape[1]
    inputs = {"left_rows": left, "right_rows": right, "ends": ends, "scale": _numbers(scale)}
    if total is not None:
        inputs["total"] = total
    return Launch(
        name="expert_gradient",
        memory="ExpertGradientMemory",
        inputs=inputs,
        outputs={"out": ((experts, height, width), mx.float32)},
        values=_values(left.dtype, cut) | {"ADDED": total is not None},
        order=(*_ORDER, "ADDED"),
        memory_order=("In", "ROWS", "COLUMNS", "DEPTH"),
        blocks=(-(-width // wide), -(-height // tall), experts),
        bytes=2 * deep * (_stride(tall) + _stride(wide)) * left.dtype.size + _ARRIVALS,
        groups=_GROUPS,
        arguments=("left_rows", "right_rows", "ends", "scale", "scale" if total is None else "total", "out"),
        sizes=("left_rows_shape[1]", "right_rows_shape[1]"),
    )


_ORDER = ("In", "ROWS", "COLUMNS", "DEPTH", "GROUPS", "ACROSS")


def _values(dtype: mx.Dtype, cut: Cut) -> dict[str, int | bool | mx.Dtype]:
    return dict(zip(_ORDER, (dtype, *cut[:3], _GROUPS, cut[3]), strict=True))


@lru_cache
def product_bytes(size: int, tall: int, wide: int, deep: int, transpose: bool) -> int:
    """Shared memory of a block: two stages of both operands, of which the results make use later."""
    weight = wide * _stride(deep) if transpose else deep * _stride(wide)
    return max(2 * (tall * _stride(deep) + weight), tall * _stride(wide)) * size + _ARRIVALS


def _stride(columns: int) -> int:
    return columns + 8


def _numbers(scale: mx.array | float) -> mx.array:
    return scale.reshape(1) if isinstance(scale, mx.array) else numbers(scale)


@cache
def number(value: float) -> mx.array:
    """As `numbers`, without its axis."""
    with mx.stream(mx.cpu):  # Which waits for nothing that is queued.
        first = numbers(value)[0]
        mx.eval(first)
    return first
