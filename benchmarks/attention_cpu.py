"""Attention on a CPU, forward and backward: blocks of queries against MLX's own attention, in one table.

usage: DELTATUNE_THREADS=2 python benchmarks/attention_cpu.py [--lengths 512 2048 8192] [--rounds 5] [--dtype float32]

Rounds are interleaved in one process, so that whatever else the machine does falls on both; medians are printed, and
ratios are medians of the rounds' own. CPU is the time of all threads together: waiting BLAS threads spin, but on a busy
machine it says more than the clock. Peaks are MLX's count beyond inputs, output and gradients. Where the
two differ by more than 1e-5 of the norm (1e-2 in half precision), no time is printed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx
import numpy as np

import processes
from deltatune.ops.attention.blocked import attention_blocked
from deltatune.ops.attention.native import attention_native
from machine import heading

# Query heads, key heads, head size: as the attention of Qwen3.5-0.8B, and one of usual heads.
SHAPES = ((8, 2, 256), (8, 8, 64))


def inputs(length: int, shape: tuple[int, int, int], dtype: mx.Dtype) -> list[mx.array]:
    heads, key_heads, size = shape
    draw = np.random.default_rng(0)
    sizes = [(1, count, length, size) for count in (heads, key_heads, key_heads, heads)]
    arrays = [mx.array(draw.standard_normal(each, dtype=np.float32)).astype(dtype) for each in sizes]
    mx.eval(arrays)
    return arrays


def differentiate(function: Callable[..., mx.array], arrays: list[mx.array]) -> list[mx.array]:
    def call(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        return [function(q, k, v, scale=q.shape[-1] ** -0.5)]

    y, gradients = mx.vjp(call, arrays[:3], arrays[3:])
    results = [*y, *gradients]
    mx.eval(results)
    return results


def measure(function: Callable[..., mx.array], arrays: list[mx.array]) -> tuple[float, float, int]:
    """Seconds, those of all threads together, and bytes beyond the inputs and the results."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    start, used = time.perf_counter(), time.process_time()
    results = differentiate(function, arrays)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    return seconds, used, mx.get_peak_memory() - before - sum(x.nbytes for x in results)


def difference(arrays: list[mx.array]) -> float:
    pairs = zip(*(differentiate(f, arrays) for f in (attention_blocked, attention_native)), strict=True)
    found = []
    for one, other in pairs:
        a, b = (np.array(x.astype(mx.float32), np.float64) for x in (one, other))
        found.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    return max(found)


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    options = parser.parse_args()
    dtype = getattr(mx, options.dtype)
    mx.set_default_device(mx.cpu)
    print(f"attention, causal, batch 1, {options.dtype}, forward and backward, median of {options.rounds} rounds.")
    print(f"{heading()}.\n")
    print("| heads | size | T | blocked, s | MLX's own | ratio | blocked, CPU s | MLX's own | ratio | MB | MLX's own |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for length in options.lengths:
            arrays = inputs(length, shape, dtype)
            off = difference(inputs(min(length, 1024), shape, dtype))
            if not off <= (1e-5 if dtype == mx.float32 else 1e-2):
                print(f"| {shape[0]}/{shape[1]} | {shape[2]} | {length} | they differ by {off:.1e} | | | | |")
                continue
            rounds = [
                (measure(attention_blocked, arrays), measure(attention_native, arrays)) for _ in range(options.rounds)
            ]
            shown = []
            for i in (0, 1):
                pair = [statistics.median(each[who][i] for each in rounds) for who in (0, 1)]
                ratio = statistics.median(one[i] / other[i] for one, other in rounds)
                shown.append(f"{pair[0]:.3f} | {pair[1]:.3f} | {ratio:.2f}")
            peaks = [max(each[who][2] for each in rounds) / 1e6 for who in (0, 1)]
            print(
                f"| {shape[0]}/{shape[1]} | {shape[2]} | {length} | {' | '.join(shown)} | "
                f"{peaks[0]:.1f} | {peaks[1]:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
