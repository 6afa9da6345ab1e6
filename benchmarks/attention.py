"""Attention on an NVIDIA GPU, forward and backward: ours beside MLX's own and PyTorch's, in one run.

usage: python benchmarks/attention.py [--rows N ...] [--calls 20] [--only errors times]
       compute-sanitizer --tool memcheck python benchmarks/attention.py --only tiny

First errors against float64 on small and odd sizes, and whether two runs give the same bits; then, for each size of the
table, time a call (waited for each, and many in a row) and memory beyond the inputs and gradients. Each implementation
gets bf16 arrays with the same values. Nothing is timed where our errors are larger than PyTorch's flash attention's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx

import processes
from attention_errors import SMALL, are_in_order, check_options, same_bits, tiny
from attention_peers import Mlx, Size, drawn, guarded, peers
from deltatune.ops.attention.fused_op import attention_fused

# The table, with the times of PyTorch 2.11's flash attention that it was set by.
TABLE = (
    Size(2, 2048, 8, 2, 256),
    Size(1, 8192, 8, 2, 256),
    Size(1, 8192, 16, 2, 256),
    Size(1, 8192, 32, 8, 128),
    Size(1, 8191, 32, 8, 128),
    Size(1, 8192, 16, 16, 192, 128),
    Size(1, 32768, 8, 2, 256),
)


def warm() -> None:
    """Builds the kernels, each size and type in a process of its own, side by side: later processes find them."""
    sizes = {(size.size, size.values, dtype) for size, dtypes in SMALL.items() for dtype in dtypes}
    sizes |= {(size.size, size.values, "bfloat16") for size in TABLE}
    processes = [
        subprocess.Popen([sys.executable, __file__, "--warm", str(size), str(values), dtype])
        for size, values, dtype in sorted(sizes)
    ]
    for process in processes:
        process.wait()


def warm_one(size: int, values: int, dtype: str) -> None:
    entry = Mlx(attention_fused)
    entry.load(drawn(Size(1, 40, 2, 1, size, values)), dtype)
    entry.once()


def kernel_times(size: Size, calls: int) -> None:
    """The time of each kernel of ours, by calls in a row of the forward pass alone and of each launch."""
    from deltatune.ops.attention import hopper
    from deltatune.ops.attention.fused import FusedOptions
    from deltatune.ops.kernels.launch import Launch, on

    q, k, v, dy = (mx.array(x).astype(mx.bfloat16) for x in drawn(size))
    kind = FusedOptions(size.size**-0.5, True, None, False, False)
    launches: list[Launch] = []

    def noted(launch: Launch) -> list[mx.array]:
        launches.append(launch)
        results = launch.run()
        mx.eval(results)
        return results

    x = {"q": q, "k": k, "v": v}
    with on(noted):
        y, sums = hopper.forward(kind, x)
        hopper.backward(kind, x | {"dy": dy, "y": y, "sums": sums})
    shown = []
    for launch in launches:
        mx.eval([launch.run() for _ in range(3)])
        start = time.perf_counter()
        mx.eval([launch.run() for _ in range(calls)])
        shown.append(f"{launch.name.rpartition('_')[2]} {(time.perf_counter() - start) / calls * 1e3:.3f}")
    print(f"{size} ms a launch: {', '.join(shown)}", flush=True)


def measure(size: Size, calls: int) -> None:
    arrays = drawn(size)
    calls = max(2, min(calls, int(2e15 / size.operations)))
    for name, entry in peers().items():
        if name == "MLX's own" and size.length > 8192:
            continue
        entry.load(arrays)
        times = guarded(lambda entry=entry: entry.time(2 if name == "MLX's own" else calls))  # noqa: B023
        peak = guarded(entry.excess)
        entry.release()
        if isinstance(times, str):
            print(f"{size} {name:12} {times}", flush=True)
            continue
        rate = size.operations / times[1] / 1e12
        print(
            f"{size} {name:12} {times[0] * 1e3:8.3f} ms, in a row {times[1] * 1e3:8.3f} ms ({rate:.0f} TFLOP/s), "
            f"{peak / 1e9:.2f} GB",
            flush=True,
        )


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(TABLE))), help="which rows of the table")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=["tiny", "errors", "options", "bits", "kernels", "times"])
    parser.add_argument("--warm", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warm:
        size, values, dtype = options.warm
        warm_one(int(size), int(values), dtype)
        return
    only = options.only or ["errors", "options", "bits", "kernels", "times"]
    if only == ["tiny"]:
        tiny()
        return
    start = time.perf_counter()
    warm()
    print(f"-- kernels built, {time.perf_counter() - start:.0f} s", flush=True)
    if "errors" in only and not are_in_order():
        raise SystemExit(1)
    if "options" in only:
        check_options()
    for row in options.rows:
        print(f"-- {time.perf_counter() - start:.0f} s", flush=True)
        if "bits" in only and TABLE[row].length <= 8192:
            same_bits(TABLE[row])
        if "kernels" in only:
            kernel_times(TABLE[row], options.calls if TABLE[row].length <= 8192 else 3)
        if "times" in only:
            measure(TABLE[row], options.calls)
    print(f"-- {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
