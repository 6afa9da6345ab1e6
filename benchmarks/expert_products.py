"""The products of a mixture's experts on Hopper: its own kernel beside the one of all GPUs, first errors, then times.

usage: python benchmarks/expert_products.py [--calls 10] [--tokens 4096] [--teams 3 2]
       compute-sanitizer --tool memcheck python benchmarks/expert_products.py --tiny

Each line is a size of matrices, those of a layer of Qwen3.5-35B-A3B: 256 experts, 8 a token, as uneven as a router
leaves them. `transposed` multiplies by a matrix's last axis, as the forward pass does. Each kernel's figure is the
microseconds of one of many calls that wait for one another, its TB/s of matrices, rows and results, each moved once,
and its error against float64 over the largest element, for some rows; all results are compared with the other kernel's.
Where a product is wrong, its error stands in place of a time, and the program fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx
import numpy as np

import processes
from deltatune.ops.experts import grouped, trial_case
from deltatune.ops.experts.grouped_hopper import GroupedProduct, HopperTile
from deltatune.ops.experts.trial_case import GROUPED, ON_TENSOR_CORES
from deltatune.ops.operator.measure import relative_error
from machine import heading

EXPERTS, TOP_K, SCALE, SHOWN = 256, 8, 1.75, 24
# Inputs, outputs, and whether the matrices are multiplied by their last axis.
SIZES = ((2048, 1024, True), (512, 2048, True), (1024, 2048, False), (2048, 512, False))
TINY = ((384, 320, True), (320, 384, False), (128, 128, True), (192, 128, False))
TINY_COUNTS = [70, 0, 3, 200, 64, 1]
BOUND = GROUPED["bfloat16"] + ON_TENSOR_CORES
Tile = grouped.TileShape | HopperTile


def counts_of(tokens: int) -> np.ndarray:
    """Draw how many rows each expert gets: each token chooses its experts by popularity and chance."""
    draw = np.random.default_rng(0)
    scores = 0.5 * draw.normal(size=EXPERTS) + draw.gumbel(size=(tokens, EXPERTS))
    return np.bincount(np.argsort(-scores, axis=1)[:, :TOP_K].reshape(-1), minlength=EXPERTS)


class Product:
    """Rows, matrices and what the product is added to, or None, and the same product by any kernel."""

    def __init__(self, counts: np.ndarray, inputs: int, outputs: int, transpose: bool, added: bool = False):
        self.counts, self.transpose, total = counts, transpose, int(counts.sum())
        shape = (len(counts), outputs, inputs) if transpose else (len(counts), inputs, outputs)
        self.rows, self.weight, self.onto = (
            mx.random.normal(size).astype(mx.bfloat16) for size in ((total, inputs), shape, (total, outputs))
        )
        self.onto = self.onto if added else None
        self.ends = mx.array(np.cumsum(counts).astype(np.int32))
        self.scale = mx.array([SCALE], mx.float32)
        mx.eval(self.rows, self.weight, self.ends, self.scale)
        self.moved = 2 * (self.rows.size + self.weight.size + total * outputs * (2 if added else 1))

    def run(self, tile: Tile | None, after: mx.array | None = None) -> mx.array:
        rows = self.rows if after is None else mx.depends([self.rows], [after])[0]
        operands = GroupedProduct(rows, self.weight, self.ends, self.transpose, self.scale, self.onto)
        return grouped.product(operands, tile)()[0]

    def error(self, tile: Tile | None, other: mx.array | None) -> tuple[float, mx.array]:
        """The error of some rows, or of all beside `other` if that is larger; all memory for results is NaN before."""
        outputs = self.weight.shape[1 if self.transpose else 2]
        mx.eval(mx.full((len(self.rows), outputs), np.nan, mx.bfloat16))
        found = self.run(tile)
        mx.eval(found)
        ends = np.cumsum(self.counts)
        used = np.flatnonzero(self.counts)
        used = used[:: max(1, len(used) * 2 // SHOWN)]
        some = [(e, row) for e in used for row in {int(ends[e] - self.counts[e]), int(ends[e]) - 1}]
        exact = np.stack([self.exact(int(e), row) for e, row in some])
        worst = relative_error(found[mx.array([row for _, row in some])], exact)
        if other is not None:
            # Two kernels that round the same sum differ by one rounding of each.
            between = mx.abs(found.astype(mx.float32) - other.astype(mx.float32)).max() / mx.abs(other).max()
            worst = max(worst, float(between) / 2 if np.isfinite(float(between)) else float("inf"))
        return worst, found

    def exact(self, expert: int, row: int) -> np.ndarray:
        matrix = as_float64(self.weight[expert])
        product = SCALE * as_float64(self.rows[row]) @ (matrix.T if self.transpose else matrix)
        return product if self.onto is None else product + as_float64(self.onto[row])


def as_float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def best(call: Callable[[mx.array | None], mx.array], calls: int) -> float:
    """The microseconds of one of so many calls, each of which waits for the one before: the best of several runs."""
    times = []
    for _ in range(5):
        result = None
        start = time.perf_counter()
        for _ in range(calls):
            result = call(result)
        mx.eval(result)
        times.append(time.perf_counter() - start)
    return 1e6 * min(times[1:]) / calls


def line(product: Product, tiles: list[Tile | None], calls: int) -> bool:
    """Print the figures of each tile's kernel; returns whether all are right. Without calls, nothing is timed."""
    right, other = True, None
    for tile in tiles:
        worst, other = product.error(tile, other)
        if not worst <= BOUND:
            right, shown = False, f"WRONG by {worst:.1e}"
        elif calls:
            took = best(lambda after, tile=tile: product.run(tile, after), calls)
            shown = f"{took:.0f}, {1e-6 * product.moved / took:.2f} TB/s, {worst:.1e}"
        else:
            shown = f"{worst:.1e}"
        print(shown, end=" | ", flush=True)
    print(flush=True)
    return right


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--teams", type=int, nargs="+", default=[2], help="the teams of Hopper's blocks, 64 rows each")
    parser.add_argument("--tiny", action="store_true", help="errors alone, on sizes for compute-sanitizer")
    options = parser.parse_args()
    counts = np.array(TINY_COUNTS) if options.tiny else counts_of(options.tokens)
    print(f"{heading()}\n\n{counts.sum()} rows of {len(counts)} experts, {counts.min()} to {counts.max()} each\n")
    print(f"| matrices | all GPUs' kernel | {' | '.join(f'Hopper, {teams} teams' for teams in options.teams)} |")
    print("|---" * (len(options.teams) + 2) + "|")
    right = []
    for inputs, outputs, transpose in TINY if options.tiny else SIZES:
        for added in (False, True) if options.tiny else (False,):
            product = Product(counts, inputs, outputs, transpose, added)
            print(f"| {inputs} to {outputs}{', transposed' * transpose}{', added' * added} | ", end="", flush=True)
            tiles = [HopperTile(teams, 256 if outputs > 128 else 128) for teams in options.teams]
            right.append(line(product, [None, *tiles], 0 if options.tiny else options.calls))
            del product
    rows, weight = mx.zeros((5, 512), mx.bfloat16), mx.zeros((2, 512, 512), mx.bfloat16)
    served = trial_case.product_tile(rows, weight, True, False)
    print(f"\nAfter the trial, this tile serves: {served}")
    fine = all(right) and isinstance(served, HopperTile)
    sys.exit(0 if fine else "A product is wrong, or Hopper's kernel does not serve.")


if __name__ == "__main__":
    main()
