"""The launches of LoRA's kernels for NVIDIA GPUs (kernels/products/low_rank.h), and the same by MLX's products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

import mlx.core as mx

from ...machine import backend, nvidia
from ..functional import as_list, not_differentiated_again
from ..kernels.launch import Execute, Kernel, Launch, numbers

# How many rows a block of `rows` may take, and the most sums of a block, and of one with all groups.
_LINES, _SUMS, _SUMS_OF_ALL, _GROUPS = (64, 32, 16), 2048, 256, 16
# The columns that a group of `columns` takes, how many blocks share a multiprocessor, and how many bytes the other one
# reads while a block starts and ends.
STRIPE, _TOGETHER, _IDLE = 64, 2, 2**15
# The groups of a block of `wide`, each of which takes 32 rows of 64 columns.
_WIDE_GROUPS = 8
# Blocks have so many threads that the compiler must know their number.
ROWS = Kernel(
    name="low_rank_rows",
    files=("fragments.h", "products/low_rank.h"),
    values=("In", "RANK", "LINES", "GROUPS", "TRANSPOSED"),
    sizes=("x_shape[0]", "x_shape[1]"),
    arrays=("x", "weight", "numbers", "out"),
    memory="LowRankRowsMemory",
    memory_values=("RANK", "LINES", "GROUPS"),
    bounded=True,
)
COLUMNS = replace(
    ROWS,
    name="low_rank_columns",
    values=("In", "RANK", "SIDE", "GROUPS", "ACROSS"),
    sizes=("wide_shape[0]", "wide_shape[1]", "threadgroups_per_grid.y"),
    arrays=("narrow", "wide", "numbers", "out", "handed"),
    memory="LowRankColumnsMemory",
    memory_values=("RANK", "SIDE", "GROUPS", "ALONG"),
)
BOTH = replace(
    COLUMNS,
    name="low_rank_both",
    values=("In", "RANK", "SIDE", "GROUPS"),
    arrays=("narrow", "wide", "weight", "numbers", "out", "along", "handed"),
)
WIDE = replace(
    ROWS,
    name="low_rank_wide",
    values=("In", "RANK", "GROUPS", "TURNED"),
    sizes=("y_shape[0]", "y_shape[1]"),
    arrays=("narrow", "weight", "y", "numbers", "out"),
    memory="LowRankWideMemory",
    memory_values=("GROUPS",),
)

T = TypeVar("T")
Arrays = Sequence[mx.array]


class LowRankKernel:
    """A kernel of LoRA's products; its subclasses hold all that its text depends on.

    Attributes:
        name: The kernel's name for messages.
        rank: The width of the narrow matrices together.
        count: The number of narrow matrices, and of weights.
        results: How many of the launch's first outputs are results; the others are arrays that blocks hand to one
            another.
    """

    name: ClassVar[str]
    dtype: mx.Dtype
    rank: int
    count: int = 1

    @property
    def results(self) -> int:
        return 1

    def on_trial(self) -> Self:
        """Return the kernel of the same text to try in the place of this one."""
        return self

    def __call__(self, arrays: Arrays, scale: float, execute: Execute) -> list[mx.array]:
        """Run the kernel; its gradients are those of `with_mlx`."""

        def forward(*inputs: mx.array) -> list[mx.array]:
            return execute(self.launch(inputs, scale))[: self.results]

        def backward(primals: Any, cotangents: Any, _outputs: Any) -> list[mx.array]:
            # MLX passes a single array by itself, and several as a list.
            return mx.vjp(lambda *inputs: self.with_mlx(inputs, scale), list(primals), as_list(cotangents))[1]

        return list(not_differentiated_again(forward, backward)(*arrays))

    def with_mlx(self, arrays: Arrays, scale: float) -> list[mx.array]:
        """Compute the kernel's results by MLX's products."""
        raise NotImplementedError

    def launch(self, arrays: Arrays, scale: float) -> Launch:
        """Describe the launch for matrices."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowsKernel(LowRankKernel):
    """scale * x weight, for x [rows, inputs] and each of some weights: sums along rows.

    Args:
        dtype: That of all operands and results.
        rank: The width of all results together.
        lines: How many rows a block takes.
        transpose: Whether the weight is [rank, inputs] and not [inputs, rank]; then there is one.
        count: The number of weights, and of results. All are equally wide, by a multiple of 8 if there are several.
    """

    dtype: mx.Dtype
    rank: int
    lines: int
    transpose: bool
    count: int = 1
    name = "rows"

    @property
    def results(self) -> int:
        return self.count

    def with_mlx(self, arrays: Arrays, scale: float) -> list[mx.array]:
        x, *weights = arrays
        return [scaled_product(scale, x, weight.T if self.transpose else weight) for weight in weights]

    def launch(self, arrays: Arrays, scale: float) -> Launch:
        x, *weights = arrays
        groups = self.groups
        of_weights, outputs = _numbered("weight", weights), _numbered("out", [None] * self.count)
        shape = (x.shape[0], self.rank // self.count)
        return Launch(
            kernel=ROWS,
            inputs={"x": x, **of_weights, "numbers": numbers(float(scale))},
            outputs=dict.fromkeys(outputs, (shape, self.dtype)),
            values={
                "In": self.dtype,
                "RANK": self.rank,
                "LINES": self.lines,
                "GROUPS": groups,
                "TRANSPOSED": self.transpose,
            },
            blocks=(-(-x.shape[0] // self.lines), 1, 1),
            bytes=groups * self.lines * (padded(self.rank) + 1) * 4,
            groups=groups,
            written={"weight": _together(tuple(of_weights), shape[1]), "out": _together(tuple(outputs), shape[1])},
        )

    @property
    def groups(self) -> int:
        """The groups of 32 lanes in a block: fewer where each lane has more sums, which take its registers."""
        return _GROUPS if self.lines * padded(self.rank) <= _SUMS_OF_ALL else _GROUPS // 2


@dataclass(frozen=True)
class ColumnsKernel(LowRankKernel):
    """scale * narrow^T wide [rank, columns], or its transpose, for each of some narrow matrices: sums over rows.

    Args:
        dtype: That of all operands and results.
        rank: The width of all narrow matrices together.
        side: How many stripes of columns a block takes.
        block_rows: How many rows a block may take; the kernel's text does not depend on it.
        across: Whether the result is [rank, columns] and not [columns, rank]; then there is one narrow matrix.
        count: The number of narrow matrices and of results, as in RowsKernel.
    """

    dtype: mx.Dtype
    rank: int
    side: int
    block_rows: int
    across: bool
    count: int = 1
    name = "columns"

    @property
    def results(self) -> int:
        return self.count

    def on_trial(self) -> Self:
        """As LowRankKernel.on_trial, with so few rows a block that a trial has several blocks."""
        return replace(self, block_rows=round_rows(self.rank, self.side))

    def with_mlx(self, arrays: Arrays, scale: float) -> list[mx.array]:
        *narrow, wide = arrays
        return [scaled_product(scale, *((one.T, wide) if self.across else (wide.T, one))) for one in narrow]

    def launch(self, arrays: Arrays, scale: float) -> Launch:
        *narrow, wide = arrays
        rows, columns = wide.shape
        tiles, parts = self.grid(rows, columns)
        inputs, results, rank_of_one = _numbered("narrow", narrow), _numbered("out", narrow), self.rank // self.count
        outputs = dict.fromkeys(results, ((self.rank, columns) if self.across else (columns, rank_of_one), self.dtype))
        return Launch(
            kernel=COLUMNS,
            inputs={**inputs, "wide": wide, "numbers": numbers(float(scale))},
            outputs=outputs | {"handed": self.handed(parts, tiles)},
            values={
                "In": self.dtype,
                "RANK": self.rank,
                "SIDE": self.side,
                "GROUPS": column_groups(self.rank),
                "ACROSS": self.across,
                "ALONG": False,
            },
            blocks=(tiles, parts, 1),
            bytes=_column_bytes(self.rank, self.side, False),
            groups=column_groups(self.rank),
            written={"narrow": _together(tuple(inputs), rank_of_one), "out": _together(tuple(results), rank_of_one)},
        )

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """The number of blocks next to one another, and below one another."""
        return -(-columns // (self.side * STRIPE)), -(-rows // self.block_rows)

    def handed(self, parts: int, tiles: int, along: int = 0) -> tuple[tuple[int, ...], mx.Dtype]:
        """The array in which blocks hand over marks, their sums over rows, and `along` elements of those along rows."""
        blocks = parts * tiles
        return (4 * blocks + (blocks * self.side * STRIPE * self.rank if parts > 1 else 0) + along,), mx.float32


@dataclass(frozen=True)
class BothKernel(ColumnsKernel):
    """scale * narrow^T wide [rank, columns] and scale * wide weight^T [rows, rank]: both products in one reading.

    The weight is [rank, columns]; the arguments are those of ColumnsKernel, with `across`.
    """

    name = "both"

    @property
    def results(self) -> int:
        return 2

    def with_mlx(self, arrays: Arrays, scale: float) -> list[mx.array]:
        narrow, wide, weight = arrays
        return [scaled_product(scale, narrow.T, wide), scaled_product(scale, wide, weight.T)]

    def launch(self, arrays: Arrays, scale: float) -> Launch:
        narrow, wide, weight = arrays
        rows, columns = wide.shape
        tiles, parts = self.grid(rows, columns)
        along = tiles * -(-rows * self.rank // 4) * 4 if tiles > 1 else 0
        return Launch(
            kernel=BOTH,
            inputs={"narrow": narrow, "wide": wide, "weight": weight, "numbers": numbers(float(scale))},
            outputs={
                "out": ((self.rank, columns), self.dtype),
                "along": ((rows, self.rank), self.dtype),
                "handed": self.handed(parts, tiles, along),
            },
            values={
                "In": self.dtype,
                "RANK": self.rank,
                "SIDE": self.side,
                "GROUPS": column_groups(self.rank),
                "ALONG": True,
            },
            blocks=(tiles, parts, 1),
            bytes=_column_bytes(self.rank, self.side, True),
            groups=column_groups(self.rank),
        )


@dataclass(frozen=True)
class WideKernel(LowRankKernel):
    """y + scale * narrow weight, for y [rows, columns], summed over some pairs of a narrow matrix and a weight.

    Args:
        dtype: That of all arrays.
        rank: The width of all narrow matrices together.
        transpose: Whether the weight is [columns, rank] and not [rank, columns]; else there is one.
        count: The number of narrow matrices and of weights, as in RowsKernel.
    """

    dtype: mx.Dtype
    rank: int
    transpose: bool
    count: int = 1
    name = "wide"

    def with_mlx(self, arrays: Arrays, scale: float) -> list[mx.array]:
        y = arrays[0]
        for narrow, weight in zip(arrays[1 : 1 + self.count], arrays[1 + self.count :], strict=True):
            y = mx.addmm(y, narrow, weight.T if self.transpose else weight, alpha=scale)
        return [y]

    def launch(self, arrays: Arrays, scale: float) -> Launch:
        y, *more = arrays
        rows, columns = y.shape
        narrow, weights = _numbered("narrow", more[: self.count]), _numbered("weight", more[self.count :])
        rank_of_one = self.rank // self.count
        return Launch(
            kernel=WIDE,
            inputs={**narrow, **weights, "y": y, "numbers": numbers(float(scale))},
            outputs={"out": (y.shape, self.dtype)},
            values={"In": self.dtype, "RANK": self.rank, "GROUPS": _WIDE_GROUPS, "TURNED": self.transpose},
            blocks=(-(-columns // 64), -(-rows // (32 * _WIDE_GROUPS)), 1),
            bytes=16,
            groups=_WIDE_GROUPS,
            written={"narrow": _together(tuple(narrow), rank_of_one), "weight": _together(tuple(weights), rank_of_one)},
        )


def _numbered(name: str, arrays: Sequence[T]) -> dict[str, T]:
    """Return the arrays by `name` with their numbers, a single one by the name alone."""
    return {f"{name}{i if len(arrays) > 1 else ''}": array for i, array in enumerate(arrays)}


@cache
def _together(names: tuple[str, ...], width: int) -> str:
    """Return the text of one argument that stands for these arrays with lines of `width` elements."""
    return names[0] if len(names) == 1 else f"several<{width}>({', '.join(names)})"


def rows_lines(total: int, rank: int) -> int:
    """How many of `total` rows a block of `rows` takes, so that the multiprocessor with the most work reads least.

    A block reads its own rows, and all of the operand that is as wide as the rank.
    """
    multiprocessors = nvidia.limits().multiprocessors

    def most_read(lines: int) -> int:
        blocks = -(-total // lines)
        return -(-blocks // multiprocessors) * (lines + padded(rank))

    return min((lines for lines in _LINES if lines * padded(rank) <= _SUMS), key=most_read)


def column_groups(rank: int) -> int:
    """The groups of 32 lanes in a block of `columns`: its sums take its lanes' registers and its shared memory."""
    return 8 if rank <= 32 else 4


def round_rows(rank: int, side: int) -> int:
    """How many rows a block of `columns` reads at once."""
    return column_groups(rank) // side * _steps(rank) * 16


@cache
def division(rows: int, columns: int, rank: int, along: bool) -> tuple[int, int]:
    """How many stripes and how many rows a block of `columns` takes, so that the last block is done soonest.

    The cost is the bytes read by the busiest place on a multiprocessor, and those added up by one block at the end.
    """
    places = _TOGETHER * nvidia.limits().multiprocessors

    def most_read(choice: tuple[int, int]) -> int:
        side, block_rows = choice
        width = min(side * STRIPE, columns)
        tiles, parts = -(-columns // (side * STRIPE)), -(-rows // block_rows)
        in_turn = -(-tiles * parts // places)
        added = (parts * width if parts > 1 else 0) + (tiles * block_rows if along and tiles > 1 else 0)
        return in_turn * (_TOGETHER * block_rows * (width + padded(rank)) * 2 + _IDLE) + added * rank * 4

    sides = [side for side in (1, 2, 4, 8) if side <= column_groups(rank) and (along or side == 1)]
    choices = [
        (side, rounds * round_rows(rank, side))
        for side in sides
        for rounds in range(1, -(-rows // round_rows(rank, side)) + 1)
    ]
    return min(choices, key=most_read)


def padded(rank: int) -> int:
    return -(-rank // 8) * 8


def scaled_product(scale: float, left: mx.array, right: mx.array) -> mx.array:
    """Return scale * left right, on a GPU in one launch: the time of many small products is that of their launches."""
    if scale == 1.0:
        return left @ right
    if backend.device() == "cpu":
        return scale * (left @ right)
    return mx.addmm(_zeros(right.shape[-1], left.dtype), left, right, alpha=scale)


def _steps(rank: int) -> int:
    return 2 if rank <= 16 else 1


def _column_bytes(rank: int, side: int, along: bool) -> int:
    """The bytes of LowRankColumnsMemory."""
    line, groups = padded(rank) + 1, column_groups(rank)
    rounds = 2 * groups * _steps(rank) * 16 * line + side * STRIPE // 16 * (padded(rank) // 8) * 64
    return 4 * max(groups * STRIPE * line, rounds if along else 0)


@cache
def _zeros(size: int, dtype: mx.Dtype) -> mx.array:
    # mx.zeros would be an operation, which every compiled function that uses the array would run again.
    return mx.array([0.0] * size, dtype)
