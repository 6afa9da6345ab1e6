"""LoRA's products on an NVIDIA GPU: our kernels beside MLX's products, first their errors and then their times.

usage: python benchmarks/low_rank.py [--calls 40] [--widths 16 1024 2048 3584 4096 6144] [--rank 8]
       compute-sanitizer --tool memcheck python benchmarks/low_rank.py --tiny

Each line is a size of x [4096, width], and each column a product: ours and MLX's, in microseconds of a call among many
in one graph, each of which reads another x until 256 MB are read. The bandwidth is that of reading, and writing, the
arrays of x's size. The last column is all that a layer does, from x A to the gradients of A and B: each product needs
the one before, so none overlap, and the figure is the time of all of them. Errors are against float64, on 64 rows or
columns, over the largest element. Where a product is wrong, its error stands in place of a time, and the program fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx
import numpy as np

import processes
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.operator.measure import relative_error
from deltatune.ops.products.low_rank import BOUNDS, add_product, both_products, columns_product, rows_product
from machine import heading

ROWS, WIDTHS, SCALE, READ, SHOWN = 4096, (16, 1024, 2048, 3584, 4096, 6144), 1.75, 256 * 2**20, 64
Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Product:
    """A product of x with narrow arrays: ours, MLX's, the truth for some rows or columns, and the times x is moved."""

    ours: Callable[[mx.array, Arrays], Sequence[mx.array]]
    mlx: Callable[[mx.array, Arrays], Sequence[mx.array]]
    exact: Callable[[np.ndarray, dict[str, np.ndarray], slice], Sequence[np.ndarray]]
    shown: Sequence[str]
    moved: int = 1


# Of the results, every so manieth row is compared, or column: `shown` says which, one word for each result.
PRODUCTS = {
    "x a": Product(
        lambda x, n: [rows_product(x, n["a"], SCALE)],
        lambda x, n: [x @ n["a"]],
        lambda x, n, some: [SCALE * x[some] @ n["a"]],
        ["rows"],
    ),
    "x b^T": Product(
        lambda x, n: [rows_product(x, n["b"], SCALE, transpose=True)],
        lambda x, n: [x @ n["b"].T],
        lambda x, n, some: [SCALE * x[some] @ n["b"].T],
        ["rows"],
    ),
    "x^T h": Product(
        lambda x, n: [columns_product(x, n["h"], SCALE)],
        lambda x, n: [x.T @ n["h"]],
        lambda x, n, some: [SCALE * x[:, some].T @ n["h"]],
        ["rows"],
    ),
    "h^T x and x b^T": Product(
        lambda x, n: both_products(x, n["h"], n["b"], SCALE),
        lambda x, n: [x @ n["b"].T, n["h"].T @ x],
        lambda x, n, some: [SCALE * x[some] @ n["b"].T, SCALE * n["h"].T @ x[:, some]],
        ["rows", "columns"],
    ),
    "x + h b": Product(
        lambda x, n: [add_product(x, n["h"], n["b"], SCALE)],
        lambda x, n: [mx.addmm(x, n["h"], n["b"], alpha=SCALE)],
        lambda x, n, some: [x[some] + SCALE * n["h"][some] @ n["b"]],
        ["rows"],
        2,
    ),
    "x + h a^T": Product(
        lambda x, n: [add_product(x, n["h"], n["a"], SCALE, transpose=True)],
        lambda x, n: [mx.addmm(x, n["h"], n["a"].T, alpha=SCALE)],
        lambda x, n, some: [x[some] + SCALE * n["h"][some] @ n["a"].T],
        ["rows"],
        2,
    ),
}


def as_float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def error(product: Product, x: mx.array, narrow: Arrays, exact: dict[str, np.ndarray]) -> float:
    """The error of our product on some rows or columns; all memory for the results is NaN before."""
    shapes = [y.shape for y in product.ours(x, narrow)]
    mx.eval([mx.full(shape, np.nan, x.dtype) for shape in shapes])
    results = product.ours(x, narrow)
    mx.eval(results)
    some = slice(0, None, max(1, min(x.shape) // SHOWN))
    found = [y[some] if shown == "rows" else y[:, some] for y, shown in zip(results, product.shown, strict=True)]
    truth = product.exact(exact["x"], exact, some)
    return max(relative_error(y, true) for y, true in zip(found, truth, strict=True))


def best(graph: Callable[[], Sequence[mx.array]], calls: int) -> float:
    """The microseconds of one of so many calls: the best of several evaluations of their graph."""
    mx.eval(graph())
    times = []
    for _ in range(5):
        start = time.perf_counter()
        mx.eval(graph())
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / calls


def layers(x: mx.array, narrow: Arrays, calls: int, ours: bool) -> list[mx.array]:
    """What LoRA adds to a layer's step, so many times; the last result of each is an operand of the next."""
    a, b = narrow["a"], narrow["b"]
    for _ in range(calls):
        if ours:
            h = rows_product(x, a)
            y = add_product(x, h, b)
            dh, db = both_products(y, h, b)
            dx, a = add_product(y, dh, a, transpose=True), columns_product(x, dh)
        else:
            h = x @ a
            y = mx.addmm(x, h, b)
            dh, db = y @ b.T, h.T @ y
            dx, a = mx.addmm(y, dh, a.T), x.T @ dh
    return [dx, a, db]


def line(width: int, rank: int, calls: int, timed: bool = True) -> bool:
    """Print the line of a width; returns whether all products are right."""
    count = min(calls, max(1, READ // (2 * ROWS * width)))
    rows = ROWS if timed else 300
    xs = [mx.random.normal((rows, width)).astype(mx.bfloat16) for _ in range(count if timed else 1)]
    shapes = {"a": (width, rank), "b": (rank, width), "h": (rows, rank)}
    narrow = {name: mx.random.normal(shape).astype(mx.bfloat16) for name, shape in shapes.items()}
    mx.eval(xs, narrow)
    exact = {name: as_float64(array) for name, array in ({"x": xs[0]} | narrow).items()}
    right = True
    print(f"| {rows} x {width}, {rank} | ", end="", flush=True)
    for product in PRODUCTS.values():
        off = error(product, xs[0], narrow, exact)
        if not off <= BOUNDS[mx.bfloat16]:
            right = False
            print(f"WRONG by {off:.1e} | ", end="", flush=True)
            continue
        shown = f"{off:.0e}"
        if timed:
            ours, theirs = (
                best(lambda run=run: [y for i in range(calls) for y in run(xs[i % count], narrow)], calls)
                for run in (product.ours, product.mlx)
            )
            shown = f"{ours:.1f} / {theirs:.1f}, {2e-6 * rows * width * product.moved / ours:.1f} TB/s, {shown}"
        print(shown, end=" | ", flush=True)
    if timed and right:
        # The factor keeps the values of layers after layers from growing.
        small = {name: array * (0.5 / (rows * width) ** 0.5) for name, array in narrow.items()}
        mx.eval(small)
        ours, theirs = (best(lambda ours=ours: layers(xs[0], small, calls, ours), calls) for ours in (True, False))
        print(f"{ours:.1f} / {theirs:.1f} |", flush=True)
    else:
        print("|", flush=True)
    return right


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument(
        "--tiny", action="store_true", help="errors alone, on sizes that compute-sanitizer gets through"
    )
    options = parser.parse_args()
    print(f"{heading()}\n")
    print(f"| size and rank | {' | '.join(PRODUCTS)} | a layer |")
    print("|---" * (len(PRODUCTS) + 2) + "|")
    sizes = [(width, options.rank) for width in options.widths]
    if options.tiny:
        sizes = [(width, rank) for width in (16, 648) for rank in (1, 7, 8, 64)]
    right = [line(width, rank, options.calls, not options.tiny) for width, rank in sizes]
    sys.exit(0 if all(right) else "A product is wrong.")


if __name__ == "__main__":
    with on(Launch.run):
        main()
