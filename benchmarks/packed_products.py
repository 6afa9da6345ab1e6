"""Times products with quantised matrices in a compiled graph: MLX's quantized_matmul, and a product after dequantising.

usage: python benchmarks/packed_products.py [--size 4096 4096] [--rows 64 512 4096] [--bits 4] [--products 40]

Each figure is the time of one product: the best of five evaluations of a graph with this many products, divided by
their number. Each product has its own matrix, quantised in groups of 64, and waits for the one before. Results are
compared first. MLX's quantized_matmul takes 20 to 30 s per layout to build on CUDA, and seconds for a product on a CPU
(there, use --products 1).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx

import processes
from deltatune.machine.compiling import without_kernels
from deltatune.ops.products.quantized_product import Quantization, packed_product
from deltatune.ops.trial.measure import largest_error
from machine import heading

Product = Callable[..., mx.array]
# The bound is bf16's rounding of sums of thousands of terms; MLX's CPU product rounds every partial sum.
BOUND = {"gpu": 2.0**-5, "cpu": 0.1}


def mlx_product(x: mx.array, matrix: list[mx.array], packing: Quantization) -> mx.array:
    return mx.quantized_matmul(x, *matrix, *packing)


def unpacked_product(x: mx.array, matrix: list[mx.array], packing: Quantization) -> mx.array:
    return packed_product(x, *matrix, packing)


def seconds(product: Product, x: mx.array, matrices: list[list[mx.array]], packing: Quantization) -> float:
    """The seconds of one product in a graph where each product waits for the one before."""

    def graph(x: mx.array) -> list[mx.array]:
        sums = []
        for matrix in matrices:
            y = product(x, matrix, packing)
            sums.append(y.sum())
            x = x + y[0, 0] * 0
        return sums

    compiled = mx.compile(graph)
    mx.eval(compiled(x))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        mx.eval(compiled(x))
        times.append(time.perf_counter() - start)
    return min(times) / len(matrices)


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--size", type=int, nargs=2, default=[4096, 4096], metavar=("OUT", "IN"))
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--products", type=int, default=40)
    options = parser.parse_args()
    outputs, inputs = options.size
    print(f"{heading()}\n")
    print(f"{outputs} x {inputs}, {options.bits} bits, bf16, us a product\n")
    print("| rows | forward, MLX | unpacked | of the rows' gradient, MLX | unpacked | MLX / unpacked |")
    print("|---" * 6 + "|")
    keys = map(mx.random.key, range(options.products))
    drawn = [mx.random.normal((outputs, inputs), key=key).astype(mx.bfloat16) for key in keys]
    matrices = [list(mx.quantize(matrix, 64, options.bits)) for matrix in drawn]
    mx.eval(matrices)
    bound = BOUND["cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"]
    with without_kernels():
        for rows in options.rows:
            found = []
            for transpose, width in ((True, inputs), (False, outputs)):
                x = mx.random.normal((rows, width)).astype(mx.bfloat16)
                packing = Quantization(transpose, 64, options.bits, "affine")
                both = [product(x, matrices[0], packing) for product in (mlx_product, unpacked_product)]
                error = largest_error(both[:1], both[1:])
                if not error < bound:
                    raise SystemExit(f"{rows} rows: the two differ by {error:.1e}; no figures.")
                found += [1e6 * seconds(product, x, matrices, packing) for product in (mlx_product, unpacked_product)]
            ratio = (found[0] + found[2]) / (found[1] + found[3])
            print(f"| {rows} | " + " | ".join(f"{each:,.0f}" for each in found) + f" | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main()
