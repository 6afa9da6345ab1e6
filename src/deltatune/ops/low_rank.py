"""LoRA's products with a result that is as narrow as the rank: h = x A, and the gradients of h, A and B.

Their time on a GPU is that of reading x once. On NVIDIA GPUs two kernels compute them, in one launch each
(kernels/low_rank.h): cuBLAS takes as long, but in two launches, which MLX records as a graph of their own, and a step
waits for that. Elsewhere, and for other dtypes and sizes, MLX's products serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..machine import backend, nvidia
from . import trial
from .kernels.launch import LOW_RANK, Execute, Launch, numbers
from .pointwise.passes import LEAST

# The largest rank, of which every lane has a share of the sums in its registers.
MOST = 64
# How many rows or columns a block may take, and the most sums of a block, and of one with all groups.
_LINES, _SUMS, _SUMS_OF_ALL, _GROUPS = (64, 32, 16), 2048, 1024, 16
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
        scale: the factor of the result.
        transpose: whether the weight is multiplied by its last axis.
        execute: runs a launch; None decides whether to use the kernel, and then runs it on the GPU.

    Returns:
        [..., r] in x's dtype.
    """
    rank = weight.shape[0 if transpose else 1]
    if execute is None:
        if not serves("rows", x, weight, rank, transpose):
            return _mlx_product(scale, x, weight.T if transpose else weight)
        execute = Launch.run
    rows = x.reshape(-1, x.shape[-1])
    kernel = LowRankKernel("rows", x.dtype, rank, _lines(rows.shape[0], rank), transpose)
    return kernel(rows, weight, scale, execute).reshape(*x.shape[:-1], rank)


def columns_product(left: mx.array, right: mx.array, scale: float = 1.0, *, execute: Execute | None = None) -> mx.array:
    """Return scale * left^T right, summed over all leading axes, with gradients by MLX's products.

    Args:
        left: [..., N].
        right: [..., K], of left's leading axes and dtype. One of N and K is the rank.
        scale: the factor of the result.
        execute: as in `rows_product`.

    Returns:
        [N, K] in left's dtype.
    """
    left, right = (array.reshape(-1, array.shape[-1]) for array in (left, right))
    across = left.shape[-1] <= right.shape[-1]
    narrow, wide = (left, right) if across else (right, left)
    rank = narrow.shape[-1]
    if execute is None:
        if not serves("columns", wide, narrow, rank, across):
            return _mlx_product(scale, left.T, right)
        execute = Launch.run
    kernel = LowRankKernel("columns", wide.dtype, rank, _lines(wide.shape[-1], rank), across)
    return kernel(narrow, wide, scale, execute)


@dataclass(frozen=True)
class LowRankKernel:
    """One of the two kernels, with all that its text depends on.

    Args:
        name: `rows` for sums along rows, `columns` for sums over rows.
        dtype: that of both operands and of the result.
        rank: the width of the result.
        lines: how many rows of the first operand, or columns of the second, a block takes.
        turned: whether the second operand of `rows`, or the result of `columns`, has the rank as its first axis.
    """

    name: str
    dtype: mx.Dtype
    rank: int
    lines: int
    turned: bool

    def __call__(self, first: mx.array, second: mx.array, scale: float, execute: Execute) -> mx.array:
        def backward(primals: Any, cotangent: mx.array, _output: mx.array) -> list[mx.array]:
            return mx.vjp(lambda one, other: [self.with_mlx(one, other, scale)], list(primals), [cotangent])[1]

        function: Any = mx.custom_function(lambda first, second: execute(self.launch(first, second, scale))[0])
        function.vjp(backward)
        return function(first, second)

    def with_mlx(self, first: mx.array, second: mx.array, scale: float) -> mx.array:
        """Return what the kernel computes, by MLX's product."""
        if self.name == "rows":
            return _mlx_product(scale, first, second.T if self.turned else second)
        narrow, wide = first, second
        return _mlx_product(scale, narrow.T, wide) if self.turned else _mlx_product(scale, wide.T, narrow)

    def launch(self, first: mx.array, second: mx.array, scale: float) -> Launch:
        """Describe the launch for two matrices: x and the weight, or the narrow one and the wide one."""
        names = ("x", "weight") if self.name == "rows" else ("narrow", "wide")
        wide, total = (names[0], first.shape[0]) if self.name == "rows" else (names[1], second.shape[1])
        shape = (self.rank, total) if self.name == "columns" and self.turned else (total, self.rank)
        groups = self.groups
        return Launch(
            name=f"{LOW_RANK}_{self.name}",
            memory="LowRankMemory",
            inputs={names[0]: first, names[1]: second, "numbers": numbers(float(scale))},
            outputs={"out": (shape, self.dtype)},
            values={
                "In": self.dtype,
                "RANK": self.rank,
                "LINES": self.lines,
                "GROUPS": groups,
                "TURNED": self.turned,
            },
            order=("In", "RANK", "LINES", "GROUPS", "TURNED"),
            memory_order=("RANK", "LINES", "GROUPS"),
            blocks=(-(-total // self.lines), 1, 1),
            bytes=groups * self.lines * (_padded(self.rank) + 1) * 4,
            groups=groups,
            sizes=(f"{wide}_shape[0]", f"{wide}_shape[1]"),
        )

    @property
    def groups(self) -> int:
        """The groups of 32 lanes in a block: fewer where each lane has more sums, which take its registers."""
        return _GROUPS if self.lines * _padded(self.rank) <= _SUMS_OF_ALL else _GROUPS // 2


def serves(name: str, wide: mx.array, narrow: mx.array, rank: int, turned: bool) -> bool:
    """Whether a kernel is to be used for these operands: it covers them, is faster, and was found right.

    Args:
        name: that of the kernel, as are `rank` and `turned`.
        wide: x or dy.
        narrow: the other operand.
    """
    if backend.device() != "cuda" or wide.size < LEAST or rank > MOST or wide.shape[-1] % 8:
        return False
    if wide.dtype != narrow.dtype or wide.dtype not in BOUNDS:
        return False
    lines = _lines(wide.size // wide.shape[-1] if name == "rows" else wide.shape[-1], rank)
    return _passes_trial(LowRankKernel(name, wide.dtype, rank, lines, turned))


def _lines(total: int, rank: int) -> int:
    """How many of `total` rows or columns a block takes, so that the multiprocessor with the most work reads least.

    A block reads its own rows or columns, and all of the operand that is as wide as the rank.
    """
    multiprocessors = nvidia.limits().multiprocessors

    def most_read(lines: int) -> int:
        blocks = -(-total // lines)
        return -(-blocks // multiprocessors) * (lines + _padded(rank))

    return min((lines for lines in _LINES if lines * _padded(rank) <= _SUMS), key=most_read)


def _padded(rank: int) -> int:
    return -(-rank // 8) * 8


@cache
def _passes_trial(kernel: LowRankKernel, execute: Execute = Launch.run) -> bool:
    """Compare a kernel with float64 on sizes that leave a rest in every loop."""

    def error() -> float:
        rows, width = 37 + kernel.lines, 64 * kernel.groups + 72
        if kernel.name == "columns":
            rows, width = 16 * 8 * kernel.groups + 37, kernel.lines + 8
        other = width if kernel.name == "rows" else rows
        x, narrow = trial.random_arrays([((rows, width), kernel.dtype), ((other, kernel.rank), kernel.dtype)])
        wide64, narrow64 = (np.array(array.astype(mx.float32), np.float64) for array in (x, narrow))
        if kernel.name == "rows":
            expected = wide64 @ narrow64
            operands = x, mx.contiguous(narrow.T) if kernel.turned else narrow
        else:
            expected = narrow64.T @ wide64 if kernel.turned else wide64.T @ narrow64
            operands = narrow, x
        # The output gets the memory of this array, so that an element that the kernel does not write is NaN.
        mx.eval(mx.full(expected.shape, np.nan, kernel.dtype))
        return trial.relative_error(kernel(*operands, _SCALE, execute), _SCALE * expected)

    return trial.passes(
        f"LoRA's product of {kernel.name}, rank {kernel.rank}, {kernel.dtype}", error, BOUNDS[kernel.dtype]
    )


def _mlx_product(scale: float, left: mx.array, right: mx.array) -> mx.array:
    """Return scale * left right, on a GPU in one launch: the time of many small products is that of their launches."""
    if scale == 1.0:
        return left @ right
    if backend.device() == "cpu":
        return scale * (left @ right)
    return mx.addmm(_zeros(right.shape[-1], left.dtype), left, right, alpha=scale)


@cache
def _zeros(size: int, dtype: mx.Dtype) -> mx.array:
    # mx.zeros would be an operation, which every compiled function that uses the array would run again.
    return mx.array([0.0] * size, dtype)
