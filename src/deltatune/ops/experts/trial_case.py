"""The cases of the kernels of grouped.py, and whether they are used: each is tried once in a process.

The errors that the expert block and its kernels may have stand here, for the tests too.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..kernels.launch import Device, Launch
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator
from ..operator.measure import as_float64, random_arrays
from . import grouped, grouped_hopper
from .grouped import TileShape
from .grouped_hopper import GroupedProduct, HopperTile, Packed

# The block in fp32 against float64: the error's norm over the norm, and the largest error over the largest element.
# There, autodiff of the dense computation in fp32 shows 1.1e-6, and the block 1.2e-6.
EXACT = 1e-6
EXACT_ELEMENT = 2e-6

# On a CPU everything inside is in fp32, so that half precision costs only the rounding of the results.
# On a GPU nine results are rounded one after another: product, bias, adapter, activation, product, bias, adapter, score
# and sum. The largest error may be their sum; the norm grows with the root of their number, as of independent errors.
ROUNDINGS_ON_GPU = 9

# The kernels for sorted rows, which sum in fp32 and round the result once: the largest error over the largest element.
GROUPED = {"bfloat16": 2.0**-8 + 2e-6, "float16": 2.0**-11 + 2e-6, "float32": 2e-6, "gradient": 2e-6}

# On a GPU the largest error may be larger by this: tensor cores truncate the sum after every 16 terms.
ON_TENSOR_CORES = 2e-5

# A block in bf16 throughout, as on CUDA, against float64: the error's norm over the norm, of y and of each gradient.
# Every intermediate result is rounded to 2^-9, which gives 6.8e-3 at the worst of them.
NARROW_NORM = 1e-2


# How many rows each expert has: the first and the fourth none, the second more than a tile.
_COUNTS = (0, 200, 1, 0, 27)
# The sizes of matrices for which grouped.py chooses a narrow tile, a tile of little depth, and any other.
_SMALL, _SHALLOW, _LARGE = 8, 24, 136
# The sizes for Hopper's kernel: more inputs than a block has stages for, and a tile of which a part is there.
_INPUTS, _OUTPUTS_OVER = 384, 64
_SCALE = 1.75


def product_tile(
    rows: mx.array,
    weight: mx.array | Packed,
    transpose: bool,
    added: bool,
    adapter: tuple[mx.array, mx.array] | None = None,
) -> TileShape | HopperTile | None:
    """Return the tile with which `grouped.product` is to be called, or None where it cannot serve all of the product.

    It is of a kernel that supports these arrays and was found right on this machine, Hopper's own if there is one.
    """
    outputs, inputs = weight.shape[1:] if transpose else weight.shape[:0:-1]
    if rows.dtype != weight.dtype:
        return None
    tiles: list[TileShape | HopperTile] = []
    rank = 0 if adapter is None else adapter[0].shape[-1]
    if grouped_hopper.supports(rows, weight) and (adapter is None or grouped_hopper.adds(rows, *adapter)):
        tiles.append(grouped_hopper.product_tile(outputs, weight.shape[0]))
    group_size = weight.group_size if isinstance(weight, Packed) else 0
    if grouped.supports(rows.dtype, inputs, outputs) and adapter is None and not group_size:
        tiles.append(grouped.product_tile(inputs, outputs))
    for tile in tiles:
        if PRODUCTS.serves(rows.dtype, transpose, added, tile, rank, group_size):
            return tile
    return None


def reads_packed(weight: Packed, rows: int, dtype: mx.Dtype) -> bool:
    """Whether products of packed matrices [E, out, in] with so many rows of `dtype` are to unpack their tiles.

    The plainest of these products decides. Another one that the kernel cannot compute unpacks all matrices before it.
    """
    return product_tile(mx.zeros((rows, weight.shape[1]), dtype), weight, False, False) is not None


def gradient_serves(left: mx.array, right: mx.array, added: bool) -> bool:
    """Whether `grouped.gradient` is to be used: it supports these arrays, and was found right on this machine.

    `added` tells whether the gradient is added to another array.
    """
    sizes = left.shape[-1], right.shape[-1]
    if left.dtype != right.dtype or not grouped.supports(left.dtype, *sizes):
        return False
    return GRADIENTS.serves(left.dtype, grouped.gradient_tile(*sizes), added)


def product_case(
    dtype: mx.Dtype, transpose: bool, added: bool, tile: TileShape | HopperTile, rank: int = 0, group_size: int = 0
) -> Case[Device]:
    """Return the case of a product with a tile of either kernel; the matrices are [outputs, inputs] if `transpose`.

    The product is `added` to other rows, and so is that of an adapter of a `rank` above 0. Matrices of a `group_size`
    above 0 are packed.
    """

    def product(rows: mx.array, weight: mx.array) -> np.ndarray:
        return np.concatenate([x @ w.T for x, w in zip(_by_expert(rows), as_float64(weight), strict=True)])

    def stored(weight: mx.array) -> mx.array:
        return weight if transpose else mx.contiguous(weight.swapaxes(-1, -2))

    inputs, outputs = _sizes_for(tile)
    rows, onto, weight = _drawn(dtype, inputs, outputs)
    matrices: mx.array | Packed = stored(weight)
    if group_size:
        words, scales, biases = mx.quantize(stored(weight), group_size, 4)
        matrices = Packed(words, scales, biases, group_size)
        numbers = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group_size, 4)
        weight = stored(numbers.astype(dtype))
    expected = _SCALE * product(rows, weight) + (as_float64(onto) if added else 0.0)
    adapter = None
    if rank:
        low_rank, _, factor = _drawn(dtype, rank, outputs)
        expected, adapter = expected + _SCALE * product(low_rank, factor), (low_rank, stored(factor))
    operands = GroupedProduct(rows, matrices, _ends(), transpose, _SCALE, onto if added else None, adapter)
    launch = grouped.product(operands, tile)
    return _case(launch, expected, GROUPED[str(dtype).rpartition(".")[2]] + ON_TENSOR_CORES)


def _sizes_for(tile: TileShape | HopperTile) -> tuple[int, int]:
    if isinstance(tile, HopperTile):
        return _INPUTS, tile.columns + _OUTPUTS_OVER
    outputs = _SMALL if tile[1] < _LARGE // 2 else _LARGE
    return _SHALLOW if tile == grouped.product_tile(_SHALLOW, outputs) else _LARGE, outputs


def gradient_case(dtype: mx.Dtype, tile: TileShape, added: bool) -> Case[Device]:
    """Return the case of a gradient with this tile; `added` tells whether it is added to another array."""
    height, width = (_SMALL if size < _LARGE // 2 else _LARGE for size in tile[:2])
    right, left, weight = _drawn(dtype, width, height)
    total = weight.astype(mx.float32)
    products = [a.T @ b for a, b in zip(_by_expert(left), _by_expert(right), strict=True)]
    expected = _SCALE * np.stack(products) + (as_float64(total) if added else 0.0)
    launch = grouped.gradient(total if added else None, left, right, _ends(), _SCALE, tile)
    return _case(launch, expected, ON_TENSOR_CORES)


def _drawn(dtype: mx.Dtype, inputs: int, outputs: int) -> list[mx.array]:
    rows = sum(_COUNTS)
    shapes = ((rows, inputs), (rows, outputs), (len(_COUNTS), outputs, inputs))
    return random_arrays([(shape, dtype) for shape in shapes])


def _ends() -> mx.array:
    return mx.array(np.cumsum(_COUNTS).astype(np.int32))


def _by_expert(rows: mx.array) -> list[np.ndarray]:
    return np.split(as_float64(rows), np.cumsum(_COUNTS)[:-1])


def _case(launch: Launch, expected: np.ndarray, bound: float) -> Case[Device]:
    return Case(
        name=launch.name,
        results=("out",),
        call=by_kernels(lambda: launch()[:1]),
        truth=lambda: [expected],
        bound=bound,
        like=[mx.zeros(*launch.outputs["out"])],
    )


_INSTEAD = "other kernels or MLX's own products"
PRODUCTS = KernelOperator("products of experts", product_case, instead=_INSTEAD)
GRADIENTS = KernelOperator("gradients of experts", gradient_case, instead=_INSTEAD)
