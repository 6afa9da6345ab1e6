"""LoRA's narrow products on an NVIDIA GPU: our kernels beside MLX's products, first their errors and then their times.

usage: python benchmarks/low_rank.py [--calls 40]

Each line is a size of x [rows, width] and a rank, and each pair of columns a product: ours and MLX's, in microseconds
of a call among many in one graph, each of which reads another x until 256 MB are read. The bandwidth is that of reading
x. In the last pair, products along rows and over rows take turns, and each needs the result of the one before; its
figure is the time of one product. Errors are against float64, on 64 rows or columns, over the largest element.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx
import numpy as np

import processes
from deltatune.ops.kernels.launch import Launch
from deltatune.ops.low_rank import BOUNDS, columns_product, rows_product
from deltatune.ops.trial import relative_error
from machine import heading

SIZES = [*((4096, width) for width in (1024, 2048, 3584, 6144)), *((16384, width) for width in (4096, 12288))]
RANKS = (8, 32)
SCALE, READ, SHOWN = 1.75, 256 * 2**20, 64
Product = Callable[[mx.array, mx.array], mx.array]
# Each product of x with another array: ours, and MLX's.
PRODUCTS: dict[str, tuple[Product, Product]] = {
    "x a": (lambda x, a: rows_product(x, a, SCALE, execute=Launch.run), lambda x, a: x @ a),
    "x b^T": (lambda x, b: rows_product(x, b, SCALE, transpose=True, execute=Launch.run), lambda x, b: x @ b.T),
    "x^T d": (lambda x, d: columns_product(x, d, SCALE, execute=Launch.run), lambda x, d: x.T @ d),
    "d^T x": (lambda x, d: columns_product(d, x, SCALE, execute=Launch.run), lambda x, d: d.T @ x),
}


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def error(name: str, x: mx.array, other: mx.array) -> float:
    """The error of our product on SHOWN of its rows or columns; all memory for the result is NaN before."""
    step = max(1, x.shape[0 if name.startswith("x ") else 1] // SHOWN)
    y = PRODUCTS[name][0](x, other)
    mx.eval(mx.full(y.shape, np.nan, y.dtype))
    mx.eval(y)
    if name.startswith("x "):
        return relative_error(y[::step], SCALE * wide(x[::step]) @ wide(other if name == "x a" else other.T))
    expected = SCALE * wide(x[:, ::step]).T @ wide(other)
    return relative_error(y[::step] if name == "x^T d" else y[:, ::step].T, expected)


def best(graph: Callable[[], Sequence[mx.array]], calls: int) -> float:
    """The microseconds of one of so many calls: the best of several evaluations of their graph."""
    mx.eval(graph())
    times = []
    for _ in range(5):
        start = time.perf_counter()
        mx.eval(graph())
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / calls


def in_turns(x: mx.array, d: mx.array, calls: int, products: tuple[Product, Product]) -> list[mx.array]:
    """Products along rows and over rows, each of which needs the one before."""
    over_rows, along_rows = products
    for _ in range(calls // 2):
        d = along_rows(x, over_rows(x, d))
    return [d]


def line(rows: int, width: int, rank: int, calls: int) -> str:
    count = min(calls, max(1, READ // (2 * rows * width)))
    xs = [mx.random.normal((rows, width)).astype(mx.bfloat16) for _ in range(count)]
    shapes = {"x a": (width, rank), "x b^T": (rank, width), "x^T d": (rows, rank), "d^T x": (rows, rank)}
    others = {name: mx.random.normal(shape).astype(mx.bfloat16) for name, shape in shapes.items()}
    mx.eval(xs, others)
    shown = []
    for name, pair in PRODUCTS.items():
        off = error(name, xs[0], others[name])
        if not off <= BOUNDS[mx.bfloat16]:
            raise SystemExit(f"{rows} x {width}, rank {rank}: {name} is off by {off:.1e}; no figures.")
        times = [best(lambda p=p, n=name: [p(xs[i % count], others[n]) for i in range(calls)], calls) for p in pair]
        bandwidth = 2e-6 * rows * width / times[0]
        shown.append(f"{times[0]:.1f} / {times[1]:.1f}, {bandwidth:.1f} TB/s, {off:.0e}")
    # The factor keeps the values of products in turns from growing.
    x = xs[0] * ((rows**0.5 + width**0.5) ** -1 / SCALE)
    mx.eval(x)
    turns = [
        best(lambda p=p: in_turns(x, others["x^T d"], calls, (PRODUCTS["x^T d"][p], PRODUCTS["x a"][p])), calls)
        for p in (0, 1)
    ]
    shown.append(f"{turns[0]:.1f} / {turns[1]:.1f}")
    return f"| {rows} x {width}, {rank} | {' | '.join(shown)} |"


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--calls", type=int, default=40)
    options = parser.parse_args()
    print(f"{heading()}\n")
    print(f"| size and rank | {' | '.join(PRODUCTS)} | in turns |")
    print("|---" * (len(PRODUCTS) + 2) + "|")
    for rank in RANKS:
        for rows, width in SIZES:
            print(line(rows, width, rank, options.calls), flush=True)


if __name__ == "__main__":
    main()
