"""Checks the norms of the residual stream on an NVIDIA GPU against float64, and times them with MLX's operations.

usage: python benchmarks/weighted_norms.py [--tokens 4096] [--repeats 200]

The first table has the largest errors over the largest exact element, in the values and gradients of a norm of a sum.
The second has the microseconds of a forward and a backward pass in bf16, as the best of five graphs with this many
one after another: of a layer's sum and norm, with a frozen weight, and of a norm by itself, such as that of q. GB/s
count the bytes that the kernels must move.
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
from deltatune.machine import backend
from deltatune.ops.pointwise.passes import BOUNDS
from deltatune.ops.pointwise.weighted_norms import sum_norm, weighted_norm
from deltatune.ops.trial import measure
from deltatune.ops.trial.measure import poison
from machine import heading

EPS = 1e-6
CHECKED = [(33, 64), (33, 256), (7, 520), (33, 1024), (5, 2560), (9, 4096), (3, 8192)]
Function = Callable[..., list[mx.array]]


def exact_sum_norm(x: mx.array, other: mx.array, weight: mx.array) -> list[mx.array]:
    total = x + other
    return [total, total * mx.rsqrt((total * total).mean(axis=-1, keepdims=True) + EPS) * weight]


def check_errors() -> bool:
    """Print the errors of the kernels, whose outputs start as NaN. Returns whether all are within their bounds."""
    good = True
    print("| rows x width | dtype | sum | norm | its gradient | the weight's gradient | |\n" + "|---" * 7 + "|")
    for rows, width in CHECKED:
        for dtype, bound in BOUNDS.items():
            keys = mx.random.split(mx.random.key(width), 5)
            arrays = [mx.random.normal((rows, width), key=key).astype(dtype) for key in keys[:4]]
            *given, d_total, dy = [*arrays[:2], mx.random.normal((width,), key=keys[4]).astype(dtype), *arrays[2:]]

            def run(given: list[mx.array] = given, d: tuple[mx.array, ...] = (d_total, dy)) -> list[mx.array]:
                outputs, gradients = mx.vjp(lambda *each: sum_norm(*each, EPS), given, list(d))
                results = [*outputs, gradients[0], gradients[2]]
                mx.eval(results)
                return results

            poison(run())
            found = run()
            with mx.stream(mx.cpu):
                wide = [array.astype(mx.float64) for array in (*given, d_total, dy)]
                outputs, gradients = mx.vjp(exact_sum_norm, wide[:3], wide[3:])
                exact = [np.array(array) for array in (*outputs, gradients[0], gradients[2])]
            errors = [measure.relative_error(one, other) for one, other in zip(found, exact, strict=True)]
            within = max(errors) <= bound
            good = good and within
            cells = " | ".join(f"{error:.1e}" for error in errors)
            print(f"| {rows} x {width} | {str(dtype).split('.')[-1]} | {cells} | {'' if within else 'over'} |")
    return good


def microseconds(function: Function, count: int, rows: int, width: int, repeats: int) -> float:
    """The microseconds of a forward and backward pass of so many arrays, each of which waits for the one before."""
    keys = mx.random.split(mx.random.key(1), count + 2)
    weight = mx.ones((width,), mx.bfloat16)
    arrays = [mx.random.normal((rows, width), key=key).astype(mx.bfloat16) for key in keys]
    mx.eval(arrays, weight)
    times = []
    for _ in range(6):
        start, given = time.perf_counter(), arrays[:count]
        for _ in range(repeats):
            outputs, given = mx.vjp(lambda *each: function(*each, weight), given, arrays[-count:])
            given = mx.depends(list(given), list(outputs))
        mx.eval(given)
        times.append(time.perf_counter() - start)
    return 1e6 * min(times[1:]) / repeats


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    if backend.device() != "cuda":
        sys.exit("The kernels are for NVIDIA GPUs, and MLX does not compute on one here.")
    print(f"{heading()}\n")
    good = check_errors()
    print("\n| | kernels, us | GB/s | MLX, us |\n|---|---|---|---|")

    def plain_sum(x: mx.array, other: mx.array, weight: mx.array) -> list[mx.array]:
        return [x + other, mx.fast.rms_norm(x + other, weight, EPS)]

    # The functions, how many arrays they take and return, a token's rows, their width, and the arrays that passes move.
    cases: list[tuple[str, Function, Function, int, int, int, int]] = [
        (f"sum and norm of {width}", lambda x, o, w: sum_norm(x, o, w, EPS), plain_sum, 2, 1, width, 8)
        for width in (1024, 2048, 4096)
    ]
    cases.append(
        (
            "norm of 8 heads of 256",
            lambda x, w: [weighted_norm(x, w, EPS)],
            lambda x, w: [mx.fast.rms_norm(x, w, EPS)],
            1, 8, 256, 5,
        )
    )  # fmt: skip
    for name, ours, plain, count, rows, width, moved in cases:
        taken, other = (microseconds(f, count, rows * options.tokens, width, options.repeats) for f in (ours, plain))
        size = 2 * rows * options.tokens * width
        print(f"| {name} | {taken:.1f} | {moved * size / taken / 1e3:,.0f} | {other:.1f} |")
    sys.exit(0 if good else "The kernels' errors are over their bounds.")


if __name__ == "__main__":
    main()
