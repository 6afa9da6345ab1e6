"""LoRA's products with arrays that are as narrow as the rank: h = x A, y + s h B, and the gradients of x, h, A and B.

Their time on a GPU is that of reading and writing the wide arrays once. On NVIDIA GPUs kernels compute them in one
launch each (kernels/products/low_rank.h). Elsewhere, and for other dtypes and sizes, MLX's products serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..kernels.launch import Execute, Launch
from ..operator.case import Case
from ..operator.kernel_operator import KernelOperator, KernelWorkload
from ..operator.measure import in_float64, random_arrays
from ..pointwise.passes import LEAST
from .low_rank_kernels import (
    STRIPE,
    BothKernel,
    ColumnsKernel,
    LowRankKernel,
    RowsKernel,
    WideKernel,
    division,
    rows_lines,
    scaled_product,
)

# The largest rank, of which every lane has a share of the sums in its registers.
MOST = 64
# The largest error over the largest element: the rounding of the result, and the tensor cores' truncation of sums.
BOUNDS = {mx.bfloat16: 2.0**-8 + 2e-5, mx.float16: 2.0**-11 + 2e-5}
_SCALE = 1.75


def rows_product(
    x: mx.array, weight: mx.array, scale: float = 1.0, *, transpose: bool = False, execute: Execute | None = None
) -> mx.array:
    """Return scale * x weight, with gradients by MLX's products.

    Args:
        x: [..., K].
        weight: [K, r], or [r, K] if `transpose`, of x's dtype.
        scale: The factor of the result.
        transpose: Whether the weight is multiplied by its last axis.
        execute: Runs a launch; None decides whether to use the kernel, and then runs it on the GPU.

    Returns:
        [..., r] in x's dtype.
    """
    rank = weight.shape[0 if transpose else 1]
    if execute or covered(rank, x, weight):
        rows = as_matrix(x)
        kernel = RowsKernel(x.dtype, rank, rows_lines(rows.shape[0], rank), transpose)
        if outputs := _by_kernel(kernel, [rows, weight], scale, execute):
            return outputs[0].reshape(*x.shape[:-1], rank)
    return scaled_product(scale, x, weight.T if transpose else weight)


def rows_products(x: mx.array, weights: Sequence[mx.array], *, execute: Execute | None = None) -> list[mx.array]:
    """Return x times each of the weights, [rows, r] each, reading x once if they are equally wide.

    Args:
        x: [rows, K].
        weights: Matrices [K, r] of x's dtype.
        execute: As in `rows_product`.
    """
    rank = _rank_together(weights)
    if rank and (execute or covered(rank, x, *weights)):
        kernel = RowsKernel(x.dtype, rank, rows_lines(x.shape[0], rank), False, len(weights))
        if outputs := _by_kernel(kernel, [x, *weights], 1.0, execute):
            return outputs
    return [rows_product(x, weight, execute=execute) for weight in weights]


def _rank_together(matrices: Sequence[mx.array]) -> int:
    """The rank of adapters' matrices [lines, r] taken as one, or 0 where a kernel cannot take them so."""
    first, *more = (matrix.shape[1] for matrix in matrices)
    rank = first * (1 + len(more))
    fits = not more or first % 8 == 0
    return rank if fits and rank <= MOST and all(other == first for other in more) else 0


def columns_product(left: mx.array, right: mx.array, scale: float = 1.0, *, execute: Execute | None = None) -> mx.array:
    """Return scale * left^T right, summed over all leading axes, with gradients by MLX's products.

    Args:
        left: [..., N].
        right: [..., K], of left's leading axes and dtype. One of N and K is the rank.
        scale: The factor of the result.
        execute: As in `rows_product`.

    Returns:
        [N, K] in left's dtype.
    """
    left, right = as_matrix(left), as_matrix(right)
    across = left.shape[-1] <= right.shape[-1]
    narrow, wide = (left, right) if across else (right, left)
    rank = narrow.shape[-1]
    if execute or covered(rank, wide, narrow):
        kernel = ColumnsKernel(wide.dtype, rank, *division(*wide.shape, rank, False), across)
        if outputs := _by_kernel(kernel, [narrow, wide], scale, execute):
            return outputs[0]
    return scaled_product(scale, left.T, right)


def columns_products(x: mx.array, narrow: Sequence[mx.array], *, execute: Execute | None = None) -> list[mx.array]:
    """Return x^T times each of the narrow matrices, [K, r] each, reading x once if they are equally wide.

    Args:
        x: [rows, K].
        narrow: Matrices [rows, r] of x's dtype.
        execute: As in `rows_product`.
    """
    rank = _rank_together(narrow)
    if rank and (execute or covered(rank, x, *narrow)):
        kernel = ColumnsKernel(x.dtype, rank, *division(*x.shape, rank, False), False, len(narrow))
        if outputs := _by_kernel(kernel, [*narrow, x], 1.0, execute):
            return outputs
    return [columns_product(x, one, execute=execute) for one in narrow]


def both_products(
    d: mx.array, low_rank: mx.array, b: mx.array, scale: float = 1.0, *, execute: Execute | None = None
) -> tuple[mx.array, mx.array]:
    """Return scale * d b^T and scale * low_rank^T d, the gradients of h and B in y + scale * h B, reading d once.

    Args:
        d: [..., N], the gradient of the result.
        low_rank: [..., r], of d's leading axes and dtype.
        b: [r, N], of d's dtype.
        scale: The factor of both results.
        execute: As in `rows_product`.

    Returns:
        [..., r] and [r, N] in d's dtype, with gradients by MLX's products.
    """
    rank = b.shape[0]
    if execute or covered(rank, d, low_rank, b):
        wide = as_matrix(d)
        kernel = BothKernel(d.dtype, rank, *division(*wide.shape, rank, True), True)
        if outputs := _by_kernel(kernel, [as_matrix(low_rank), wide, b], scale, execute):
            over, along = outputs
            return along.reshape(low_rank.shape), over
    return rows_product(d, b, scale, transpose=True), columns_product(low_rank, d, scale)


def add_product(
    y: mx.array,
    low_rank: mx.array,
    weight: mx.array,
    scale: float = 1.0,
    *,
    transpose: bool = False,
    execute: Execute | None = None,
) -> mx.array:
    """Return y + scale * low_rank weight, rounded once, with gradients by MLX's products.

    Args:
        y: [..., N].
        low_rank: [..., r], of y's leading axes and dtype.
        weight: [r, N], or [N, r] if `transpose`, of y's dtype.
        scale: The factor of the product.
        transpose: Whether the weight is multiplied by its last axis.
        execute: As in `rows_product`.

    Returns:
        [..., N] in y's dtype.
    """
    rank = low_rank.shape[-1]
    if execute or covered(rank, y, low_rank, weight):
        kernel = WideKernel(y.dtype, rank, transpose)
        if outputs := _by_kernel(kernel, [as_matrix(y), as_matrix(low_rank), weight], scale, execute):
            return outputs[0].reshape(y.shape)
    return mx.addmm(y, low_rank, weight.T if transpose else weight, alpha=scale)


def add_products(
    y: mx.array, narrow: Sequence[mx.array], weights: Sequence[mx.array], *, execute: Execute | None = None
) -> mx.array:
    """Return y plus each narrow matrix times the transpose of its weight, rounded once if they are equally wide.

    Args:
        y: [rows, N].
        narrow: Matrices [rows, r] of y's dtype.
        weights: As many matrices [N, r] of y's dtype.
        execute: As in `rows_product`.
    """
    rank = _rank_together(weights)
    if rank and (execute or covered(rank, y, *narrow, *weights)):
        kernel = WideKernel(y.dtype, rank, True, len(weights))
        if outputs := _by_kernel(kernel, [y, *narrow, *weights], 1.0, execute):
            return outputs[0]
    for one, weight in zip(narrow, weights, strict=True):
        y = add_product(y, one, weight, transpose=True, execute=execute)
    return y


def _by_kernel(
    kernel: LowRankKernel, arrays: Sequence[mx.array], scale: float, execute: Execute | None
) -> list[mx.array] | None:
    """Return the kernel's results, or None where it has failed its trial; with `execute` it needs none."""
    if execute is None and not OPERATOR.serves(kernel.on_trial()):
        return None
    return kernel(arrays, scale, execute or Launch.run)


def as_matrix(array: mx.array) -> mx.array:
    """Return the array [..., N] as a matrix [rows, N]."""
    return array if array.ndim == 2 else array.reshape(-1, array.shape[-1])


def covered(rank: int, wide: mx.array, *others: mx.array) -> bool:
    """Whether the kernels cover these operands and are faster than MLX's products: `wide` is x, y or their gradient."""
    if not OPERATOR.is_for_here or wide.size < LEAST or rank > MOST or wide.shape[-1] % 8:
        return False
    return wide.dtype in BOUNDS and all(other.dtype == wide.dtype for other in others)


def trial_case(kernel: LowRankKernel, rows: int = 0, width: int = 0) -> Case[Execute]:
    """Return the case of a kernel; without sizes they leave something over in every loop."""
    shapes = _shapes(kernel, rows, width) if rows else _shapes(kernel, *_trial_sizes(kernel))
    arrays = random_arrays([(shape, kernel.dtype) for shape in shapes])
    return Case(
        name=f"LoRA's product of {kernel.name}, rank {kernel.rank}, {kernel.dtype}",
        results=[f"product {i}" for i in range(kernel.results)],
        call=lambda execute: kernel(arrays, _SCALE, execute),
        truth=lambda: in_float64(lambda arrays: kernel.with_mlx(arrays, _SCALE), arrays),
        bound=BOUNDS[kernel.dtype],
        like=arrays,
    )


def _trial_sizes(kernel: LowRankKernel) -> tuple[int, int]:
    """Return rows and columns of the wide matrix."""
    if isinstance(kernel, RowsKernel):
        return 37 + kernel.lines, 64 * kernel.groups + 72
    if isinstance(kernel, ColumnsKernel):
        return 2 * kernel.block_rows + 37, kernel.side * STRIPE + 72
    return 293, 136


def _shapes(kernel: LowRankKernel, rows: int, width: int) -> list[tuple[int, int]]:
    rank, count = kernel.rank, kernel.count
    rank_of_one = rank // count
    if isinstance(kernel, RowsKernel):
        return [(rows, width), *[(rank, width) if kernel.transpose else (width, rank_of_one)] * count]
    if isinstance(kernel, WideKernel):
        weights = [(width, rank_of_one) if kernel.transpose else (rank, width)] * count
        return [(rows, width), *[(rows, rank_of_one)] * count, *weights]
    further = [(rank, width)] if isinstance(kernel, BothKernel) else []
    return [*[(rows, rank_of_one)] * count, (rows, width), *further]


def _workloads(quick: bool) -> list[KernelWorkload]:
    rows, width, rank = (70, 136, 5) if quick else (4096, 3584, 8)
    kernels: dict[str, Callable[[], LowRankKernel]] = {
        "x A": lambda: RowsKernel(mx.bfloat16, rank, rows_lines(rows, rank), False),
        "x B^T": lambda: RowsKernel(mx.bfloat16, rank, rows_lines(rows, rank), True),
        "gradient of A": lambda: ColumnsKernel(mx.bfloat16, rank, *division(rows, width, rank, False), False),
        "gradients of x A and B": lambda: BothKernel(mx.bfloat16, rank, *division(rows, width, rank, True), True),
        "y + x A B": lambda: WideKernel(mx.bfloat16, rank, False),
        "gradient of x": lambda: WideKernel(mx.bfloat16, rank, True),
    }
    return [
        KernelWorkload(name, mx.bfloat16, lambda kernel=kernel: trial_case(kernel(), rows, width))  # type: ignore[misc]
        for name, kernel in kernels.items()
    ]


OPERATOR = KernelOperator("LoRA's products", trial_case, Launch.run, workloads=_workloads)
