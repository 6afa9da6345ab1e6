"""LoRA's products with arrays that are as narrow as the rank: h = x A, y + s h B, and the gradients of x, h, A and B.

Their time on a GPU is that of reading and writing the wide arrays once. On NVIDIA GPUs kernels compute them in one
launch each (kernels/products/low_rank.h). Elsewhere, and for other dtypes and sizes, MLX's products serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx

from ...machine import backend, nvidia
from ..functional import as_list, not_differentiated_again
from ..kernels.launch import Blocks, Device, Kernel, Outputs, Plan, Values, forced, numbers
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator, KernelWorkload
from ..operator.measure import in_float64, random_arrays
from ..pointwise.passes import LEAST

# How many rows a block of `rows` may take, and the most sums of a block, and of one with all groups.
_LINES = (64, 32, 16)
_SUMS = 2048
_SUMS_OF_ALL = 256
_GROUPS = 16
# The columns that a group of `columns` takes, how many blocks share a multiprocessor, and how many bytes the other one
# reads while a block starts and ends.
STRIPE = 64
_TOGETHER = 2
_IDLE = 2**15
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
    body="sum_over_rows",
    values=("In", "RANK", "SIDE", "GROUPS", "ACROSS", "ALONG"),
    sizes=("wide_shape[0]", "wide_shape[1]", "threadgroups_per_grid.y"),
    arrays=("narrow", "wide", "weight", "numbers", "out", "along", "handed"),
    memory="LowRankColumnsMemory",
    memory_values=("RANK", "SIDE", "GROUPS", "ALONG"),
)
BOTH = replace(COLUMNS, name="low_rank_both")
WIDE = replace(
    ROWS,
    name="low_rank_wide",
    values=("In", "RANK", "GROUPS", "TURNED"),
    sizes=("y_shape[0]", "y_shape[1]"),
    arrays=("narrow", "weight", "y", "numbers", "out"),
    memory="LowRankWideMemory",
    memory_values=("GROUPS",),
)

Arrays = Sequence[mx.array]
# The matrices of each kernel in the order of its parameters, and those of which there may be several.
_MATRICES = {ROWS: ("x", "weight"), COLUMNS: ("narrow", "wide"), BOTH: ("narrow", "wide", "weight")}
_MATRICES[WIDE] = ("narrow", "weight", "y")
_SEVERAL = {ROWS: ("weight", "out"), COLUMNS: ("narrow", "out"), BOTH: (), WIDE: ("narrow", "weight")}


@dataclass(frozen=True)
class LowRankProduct:
    """A product of LoRA by a kernel; the wide matrix is [rows, columns].

    ROWS is scale * x weight for each of some weights, [rows, r] each: sums along rows. COLUMNS is scale * wide^T
    narrow, [columns, r] each: sums over rows. BOTH is scale * narrow^T wide [r, columns] and scale * wide weight^T
    [rows, r] in one reading. WIDE is y + scale * narrow weight, summed over pairs of a narrow matrix and a weight.

    Attributes:
        kernel: One of these.
        dtype: That of all operands and results.
        rank: The width of the narrow matrices together.
        turned: Whether the weight of ROWS is [rank, columns], the result of COLUMNS [rank, columns], or the weight of
            WIDE [columns, rank], and not the other way round. The first two have a single one then.
        count: How many narrow matrices or weights there are; several are equally wide, by a multiple of 8.
        block_rows: How many rows a block of ROWS takes, or one of COLUMNS and BOTH may take.
        side: How many stripes of columns a block of COLUMNS and BOTH takes.
    """

    kernel: Kernel
    dtype: mx.Dtype
    rank: int
    turned: bool = False
    count: int = 1
    block_rows: int = 0
    side: int = 1

    @property
    def name(self) -> str:
        """The kernel's name for messages."""
        return self.kernel.name.removeprefix("low_rank_")

    @property
    def results(self) -> int:
        """How many of the kernel's first outputs are results; the others are arrays that blocks hand to one another."""
        return {BOTH: 2, WIDE: 1}.get(self.kernel, self.count)

    @property
    def matrices(self) -> list[str]:
        """The names of the matrices that the product takes, in the order of the kernel's parameters."""
        return [one for name in _MATRICES[self.kernel] for one in self._numbered(name)]

    def on_trial(self) -> LowRankProduct:
        """Return the product of the same text to try in place of this one, with so few rows a block that some meet."""
        few = self.kernel in (COLUMNS, BOTH)
        return replace(self, block_rows=round_rows(self.rank, self.side)) if few else self

    def __call__(self, arrays: Arrays, scale: float) -> list[mx.array]:
        """Run the kernel on its matrices; its gradients are those of `with_mlx`."""
        names = self.matrices

        def forward(*arrays: mx.array) -> list[mx.array]:
            inputs = dict(zip(names, arrays, strict=True))
            rows, columns = next(inputs[name] for name in ("x", "wide", "y") if name in inputs).shape
            inputs["numbers"] = numbers(float(scale))
            return self.kernel(inputs, _plan(self, rows, columns))[: self.results]

        def backward(primals: Any, cotangents: Any, _outputs: Any) -> list[mx.array]:
            # MLX passes a single array by itself, and several as a list.
            return mx.vjp(lambda *arrays: self.with_mlx(arrays, scale), list(primals), as_list(cotangents))[1]

        return list(not_differentiated_again(forward, backward)(*arrays))

    def with_mlx(self, arrays: Arrays, scale: float) -> list[mx.array]:
        """Compute the same by MLX's products."""
        if self.kernel is ROWS:
            x, *weights = arrays
            return [scaled_product(scale, x, weight.T if self.turned else weight) for weight in weights]
        if self.kernel is COLUMNS:
            *narrow, wide = arrays
            return [scaled_product(scale, *((one.T, wide) if self.turned else (wide.T, one))) for one in narrow]
        if self.kernel is BOTH:
            one, wide, weight = arrays
            return [scaled_product(scale, one.T, wide), scaled_product(scale, wide, weight.T)]
        *pairs, y = arrays
        for one, weight in zip(pairs[: self.count], pairs[self.count :], strict=True):
            y = mx.addmm(y, one, weight.T if self.turned else weight, alpha=scale)
        return [y]

    def shapes(self, rows: int, columns: int) -> list[tuple[int, int]]:
        """Return the shapes of the matrices."""
        rank = self.rank // self.count
        across = (rank, columns) if self.turned == (self.kernel is ROWS) or self.kernel is BOTH else (columns, rank)
        known = {"narrow": (rows, rank), "weight": across}
        return [known.get(name.rstrip("0123456789"), (rows, columns)) for name in self.matrices]

    @property
    def groups(self) -> int:
        """The groups of 32 lanes in a block: fewer where each lane has more sums, which take its registers."""
        if self.kernel is WIDE:
            return _WIDE_GROUPS
        if self.kernel is not ROWS:
            return column_groups(self.rank)
        return _GROUPS if self.block_rows * padded(self.rank) <= _SUMS_OF_ALL else _GROUPS // 2

    def _numbered(self, name: str) -> tuple[str, ...]:
        """Return the names of the arrays of one kind: with their numbers if there are several."""
        several = self.count > 1 and name in _SEVERAL[self.kernel]
        return tuple(f"{name}{i}" for i in range(self.count)) if several else (name,)

    def written(self) -> dict[str, str]:
        """Return the text of the arguments that stand for several arrays with lines of so many elements."""
        rank = self.rank // self.count
        names = {name: self._numbered(name) for name in _SEVERAL[self.kernel] if self.count > 1}
        return {name: f"several<{rank}>({', '.join(several)})" for name, several in names.items()}

    def outputs(self, rows: int, columns: int) -> Outputs:
        """Return the results, and the array in which blocks of COLUMNS and BOTH hand over marks and sums."""
        rank = self.rank // self.count
        if self.kernel is WIDE:
            return {"out": ((rows, columns), self.dtype)}
        if self.kernel is ROWS:
            return dict.fromkeys(self._numbered("out"), ((rows, rank), self.dtype))
        both = self.kernel is BOTH
        shape = (self.rank, columns) if self.turned or both else (columns, rank)
        results: Outputs = dict.fromkeys(self._numbered("out"), (shape, self.dtype))
        if both:
            results["along"] = ((rows, self.rank), self.dtype)
        tiles, parts, _ = self.blocks(rows, columns)
        marks = 4 * tiles * parts
        sums = tiles * parts * self.side * STRIPE * self.rank if parts > 1 else 0
        along = tiles * -(-rows * self.rank // 4) * 4 if both and tiles > 1 else 0
        return results | {"handed": ((marks + sums + along,), mx.float32)}

    def blocks(self, rows: int, columns: int) -> Blocks:
        """Return the grid."""
        if self.kernel is WIDE:
            return -(-columns // 64), -(-rows // (32 * _WIDE_GROUPS)), 1
        down = -(-rows // self.block_rows)
        return (down, 1, 1) if self.kernel is ROWS else (-(-columns // (self.side * STRIPE)), down, 1)


@lru_cache(maxsize=1024)
def _plan(product: LowRankProduct, rows: int, columns: int) -> Plan:
    along = product.kernel is BOTH
    values: Values = {
        "In": product.dtype,
        "RANK": product.rank,
        "LINES": product.block_rows,
        "SIDE": product.side,
        "GROUPS": product.groups,
        "ALONG": along,
    }
    return Plan(
        outputs=product.outputs(rows, columns),
        values=values | {"TRANSPOSED": product.turned, "ACROSS": product.turned or along, "TURNED": product.turned},
        blocks=product.blocks(rows, columns),
        groups=product.groups,
        written=product.written(),
    )


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
        tiles = -(-columns // (side * STRIPE))
        parts = -(-rows // block_rows)
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


@cache
def _zeros(size: int, dtype: mx.Dtype) -> mx.array:
    # mx.zeros would be an operation, which every compiled function that uses the array would run again.
    return mx.array([0.0] * size, dtype)


# The largest rank, of which every lane has a share of the sums in its registers.
MOST = 64
# The largest error over the largest element: the rounding of the result, and the tensor cores' truncation of sums.
BOUNDS = {mx.bfloat16: 2.0**-8 + 2e-5, mx.float16: 2.0**-11 + 2e-5}
_SCALE = 1.75


def rows_products(
    x: mx.array, weights: Sequence[mx.array], scale: float = 1.0, *, transpose: bool = False
) -> list[mx.array]:
    """Return scale * x weight for each of the weights, reading x once if they are equally wide.

    x is [..., K], the weights [K, r], or [r, K] if `transpose`, of x's dtype, and the results [..., r] in it, with
    gradients by MLX's products.
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

    `wide` is [rows, K], and narrow matrices are [rows, r] of its dtype. The results are [K, r], or [r, K] if `across`,
    which takes one narrow matrix; their gradients are by MLX's products.
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
    """Return scale * left^T right, [N, K] in left's dtype, summed over all leading axes; one of N and K is the rank.

    left is [..., N], right [..., K], of its leading axes and dtype. Gradients are by MLX's products.
    """
    left, right = as_matrix(left), as_matrix(right)
    if left.shape[-1] <= right.shape[-1]:
        return columns_products(right, [left], scale, across=True)[0]
    return columns_products(left, [right], scale)[0]


def both_products(d: mx.array, low_rank: mx.array, b: mx.array, scale: float = 1.0) -> tuple[mx.array, mx.array]:
    """Return scale * d b^T and scale * low_rank^T d, the gradients of h and B in y + scale * h B, reading d once.

    d [..., N] is the gradient of the result, low_rank [..., r] has its leading axes, and b is [r, N], all of one dtype.
    The results are [..., r] and [r, N] in it, with gradients by MLX's products.
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

    y is [..., N], narrow arrays [..., r] of its leading axes, and weights [r, N], or [N, r] if `transpose`, as several
    are; all have one dtype. Gradients are by MLX's products.
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
