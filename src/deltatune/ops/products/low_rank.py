"""LoRA's products with arrays that are as narrow as the rank: h = x A, y + s h B, and the gradients of x, h, A and B.

Their time on a GPU is that of reading and writing the wide arrays once. On NVIDIA GPUs kernels compute them in one
launch each (kernels/products/low_rank.h). Elsewhere, and for other dtypes and sizes, MLX's products serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..kernels.launch import Device, Kernel, forced
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator, KernelWorkload
from ..operator.measure import in_float64, random_arrays
from ..pointwise.passes import LEAST
from .low_rank_kernels import (
    BOTH,
    COLUMNS,
    ROWS,
    STRIPE,
    WIDE,
    LowRankProduct,
    division,
    rows_lines,
    scaled_product,
)

# The largest rank, of which every lane has a share of the sums in its registers.
MOST = 64
# The largest error over the largest element: the rounding of the result, and the tensor cores' truncation of sums.
BOUNDS = {mx.bfloat16: 2.0**-8 + 2e-5, mx.float16: 2.0**-11 + 2e-5}
_SCALE = 1.75


def rows_products(
    x: mx.array, weights: Sequence[mx.array], scale: float = 1.0, *, transpose: bool = False
) -> list[mx.array]:
    """Return scale * x weight for each of the weights, reading x once if they are equally wide.

    Args:
        x: [..., K].
        weights: Matrices [K, r], or [r, K] if `transpose`, of x's dtype.
        scale: The factor of the results.
        transpose: Whether a weight is multiplied by its last axis.

    Returns:
        [..., r] each, in x's dtype, with gradients by MLX's products.
    """
    rank = _rank_together([weight.shape[0 if transpose else 1] for weight in weights])
    if covered(rank, x, *weights):
        rows = as_matrix(x)
        lines = rows_lines(rows.shape[0], rank)
        product = LowRankProduct(ROWS, x.dtype, rank, transpose, len(weights), lines)
        if outputs := _by_kernel(product, [rows, *weights], scale):
            return [output.reshape(*x.shape[:-1], -1) for output in outputs]
    if len(weights) > 1:
        return [rows_product(x, weight, scale, transpose=transpose) for weight in weights]
    return [scaled_product(scale, x, weight.T if transpose else weight) for weight in weights]


def rows_product(x: mx.array, weight: mx.array, scale: float = 1.0, *, transpose: bool = False) -> mx.array:
    """Return rows_products of one weight."""
    return rows_products(x, [weight], scale, transpose=transpose)[0]


def columns_products(
    wide: mx.array, narrow: Sequence[mx.array], scale: float = 1.0, *, across: bool = False
) -> list[mx.array]:
    """Return scale * wide^T narrow for each of the narrow matrices, reading `wide` once if they are equally wide.

    Args:
        wide: [rows, K].
        narrow: Matrices [rows, r] of the same dtype.
        scale: The factor of the results.
        across: Whether the result is transposed; then there is one narrow matrix.

    Returns:
        [K, r] each, or [r, K] if `across`, with gradients by MLX's products.
    """
    rank = _rank_together([one.shape[1] for one in narrow])
    if covered(rank, wide, *narrow):
        side, block_rows = division(*wide.shape, rank, False)
        product = LowRankProduct(COLUMNS, wide.dtype, rank, across, len(narrow), block_rows, side)
        if outputs := _by_kernel(product, [*narrow, wide], scale):
            return outputs
    if len(narrow) > 1:
        return [product for one in narrow for product in columns_products(wide, [one], scale)]
    return [scaled_product(scale, *((one.T, wide) if across else (wide.T, one))) for one in narrow]


def columns_product(left: mx.array, right: mx.array, scale: float = 1.0) -> mx.array:
    """Return scale * left^T right, summed over all leading axes, with gradients by MLX's products.

    Args:
        left: [..., N].
        right: [..., K], of left's leading axes and dtype. One of N and K is the rank.
        scale: The factor of the result.

    Returns:
        [N, K] in left's dtype.
    """
    left, right = as_matrix(left), as_matrix(right)
    if left.shape[-1] <= right.shape[-1]:
        return columns_products(right, [left], scale, across=True)[0]
    return columns_products(left, [right], scale)[0]


def both_products(d: mx.array, low_rank: mx.array, b: mx.array, scale: float = 1.0) -> tuple[mx.array, mx.array]:
    """Return scale * d b^T and scale * low_rank^T d, the gradients of h and B in y + scale * h B, reading d once.

    Args:
        d: [..., N], the gradient of the result.
        low_rank: [..., r], of d's leading axes and dtype.
        b: [r, N], of d's dtype.
        scale: The factor of both results.

    Returns:
        [..., r] and [r, N] in d's dtype, with gradients by MLX's products.
    """
    rank = b.shape[0]
    if covered(rank, d, low_rank, b):
        wide = as_matrix(d)
        side, block_rows = division(*wide.shape, rank, True)
        product = LowRankProduct(BOTH, d.dtype, rank, block_rows=block_rows, side=side)
        if outputs := _by_kernel(product, [as_matrix(low_rank), wide, b], scale):
            over, along = outputs
            return along.reshape(low_rank.shape), over
    return rows_product(d, b, scale, transpose=True), columns_product(low_rank, d, scale)


def add_products(
    y: mx.array, narrow: Sequence[mx.array], weights: Sequence[mx.array], scale: float = 1.0, *, transpose: bool = True
) -> mx.array:
    """Return y plus scale * narrow weight for each pair, rounded once if they are equally wide.

    Args:
        y: [..., N].
        narrow: Arrays [..., r], of y's leading axes and dtype.
        weights: As many matrices [r, N], or [N, r] if `transpose`, of y's dtype; several are [N, r].
        scale: The factor of the products.
        transpose: Whether a weight is multiplied by its last axis.

    Returns:
        [..., N] in y's dtype, with gradients by MLX's products.
    """
    rank = _rank_together([one.shape[-1] for one in narrow])
    if covered(rank, y, *narrow, *weights):
        product = LowRankProduct(WIDE, y.dtype, rank, transpose, len(weights))
        if outputs := _by_kernel(product, [*map(as_matrix, narrow), *weights, as_matrix(y)], scale):
            return outputs[0].reshape(y.shape)
    if len(weights) > 1:
        for pair in zip(narrow, weights, strict=True):
            y = add_product(y, *pair, scale, transpose=transpose)
        return y
    return mx.addmm(y, narrow[0], weights[0].T if transpose else weights[0], alpha=scale)


def add_product(
    y: mx.array, low_rank: mx.array, weight: mx.array, scale: float = 1.0, *, transpose: bool = False
) -> mx.array:
    """Return add_products of one pair, with a weight [r, N], or [N, r] if `transpose`."""
    return add_products(y, [low_rank], [weight], scale, transpose=transpose)


def _rank_together(ranks: Sequence[int]) -> int:
    """The rank of adapters' matrices of these ranks taken as one, or 0 where a kernel cannot take them so."""
    rank = sum(ranks)
    fits = len(ranks) == 1 or (len(set(ranks)) == 1 and ranks[0] % 8 == 0)
    return rank if fits and rank <= MOST else 0


def _by_kernel(product: LowRankProduct, arrays: Sequence[mx.array], scale: float) -> list[mx.array] | None:
    """Return the kernel's results, or None where it has failed its trial."""
    return product(arrays, scale) if OPERATOR.serves(product.on_trial()) else None


def as_matrix(array: mx.array) -> mx.array:
    """Return the array [..., N] as a matrix [rows, N]."""
    return array if array.ndim == 2 else array.reshape(-1, array.shape[-1])


def covered(rank: int, wide: mx.array, *others: mx.array) -> bool:
    """Whether the kernels cover these operands and are faster than MLX's products: `wide` is x, y or their gradient."""
    if forced():
        return rank > 0
    if not OPERATOR.is_for_here or wide.size < LEAST or not 0 < rank <= MOST or wide.shape[-1] % 8:
        return False
    return wide.dtype in BOUNDS and all(other.dtype == wide.dtype for other in others)


def trial_case(product: LowRankProduct, rows: int = 0, width: int = 0) -> Case[Device]:
    """Return the case of a product; without sizes they leave something over in every loop."""
    shapes = product.shapes(rows, width) if rows else product.shapes(*_trial_sizes(product))
    arrays = random_arrays([(shape, product.dtype) for shape in shapes])
    return Case(
        name=f"LoRA's product of {product.name}, rank {product.rank}, {product.dtype}",
        results=[f"product {i}" for i in range(product.results)],
        call=by_kernels(lambda: product(arrays, _SCALE)),
        truth=lambda: in_float64(lambda arrays: product.with_mlx(arrays, _SCALE), arrays),
        bound=BOUNDS[product.dtype],
        like=arrays,
    )


def _trial_sizes(product: LowRankProduct) -> tuple[int, int]:
    """Return rows and columns of the wide matrix."""
    if product.kernel is WIDE:
        return 293, 136
    if product.kernel is ROWS:
        return 37 + product.block_rows, 64 * product.groups + 72
    return 2 * product.block_rows + 37, product.side * STRIPE + 72


def _workloads(quick: bool) -> list[KernelWorkload]:
    rows, width, rank = (70, 136, 5) if quick else (4096, 3584, 8)
    dtype = mx.bfloat16

    def divided(kernel: Kernel) -> LowRankProduct:
        side, block_rows = division(rows, width, rank, kernel is BOTH)
        return LowRankProduct(kernel, dtype, rank, block_rows=block_rows, side=side)

    products: dict[str, Callable[[], LowRankProduct]] = {
        "x A": lambda: LowRankProduct(ROWS, dtype, rank, False, 1, rows_lines(rows, rank)),
        "x B^T": lambda: LowRankProduct(ROWS, dtype, rank, True, 1, rows_lines(rows, rank)),
        "gradient of A": lambda: divided(COLUMNS),
        "gradients of x A and B": lambda: divided(BOTH),
        "y + x A B": lambda: LowRankProduct(WIDE, dtype, rank, False),
        "gradient of x": lambda: LowRankProduct(WIDE, dtype, rank, True),
    }
    return [
        KernelWorkload(name, dtype, lambda product=product: trial_case(product(), rows, width))  # type: ignore[misc]
        for name, product in products.items()
    ]


OPERATOR = KernelOperator("LoRA's products", trial_case, workloads=_workloads)
