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
from math import sqrt

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx
import numpy as np

import processes
from attention_peers import Mlx, Size, drawn, guarded, peers
from deltatune.ops.attention.blocked import attention_blocked
from deltatune.ops.attention.fused_op import attention_fused
from deltatune.ops.attention.naive import attention_naive

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


SMALL = {
    Size(2, 500, 4, 2, 256): ("bfloat16", "float32"),
    Size(1, 4096, 4, 1, 256): ("bfloat16",),
    Size(1, 65, 2, 1, 128): ("bfloat16", "float16"),
    Size(1, 1000, 4, 2, 128): ("bfloat16", "float16"),
    Size(1, 8191, 4, 1, 128): ("bfloat16",),
    Size(1, 777, 2, 2, 64): ("bfloat16",),
    Size(1, 300, 2, 2, 192, 128): ("bfloat16",),
    Size(1, 200, 2, 1, 80): ("bfloat16", "float32"),
}
NAMES = ("y", "dq", "dk", "dv")


def truth(arrays: list[np.ndarray], dtype: str) -> list[np.ndarray]:
    """By PyTorch in float64, of the inputs as `dtype` holds them."""
    import torch

    q, k, v, dy = (torch.from_numpy(x).cuda().to(getattr(torch, dtype)).double() for x in arrays)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    wide = [x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v)]
    scores = (q @ wide[0].transpose(-1, -2)) / sqrt(q.shape[-1])
    length = q.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
    y = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ wide[1]
    return [x.detach().cpu().numpy() for x in (y, *torch.autograd.grad(y, [q, k, v], dy))]


def errors(results: list[np.ndarray], exact: list[np.ndarray]) -> list[float]:
    found = [float(np.linalg.norm(x - e) / np.linalg.norm(e)) for x, e in zip(results, exact, strict=True)]
    return [np.inf if np.isnan(x) else x for x in found]


def poison() -> None:
    """Leave NaN in the memory that comes next."""
    held = [mx.full((2**power,), np.nan, mx.float32) for power in range(8, 25) for _ in range(2)]
    mx.eval(held)
    del held


def are_in_order() -> bool:
    """Print the errors of every implementation. Returns whether ours are as small as they must be."""
    good = True
    for size, dtypes in SMALL.items():
        for dtype in dtypes:
            arrays = drawn(size)
            exact = truth(arrays, dtype)
            found = {}
            for name, entry in peers().items():
                if dtype == "float32" and name.startswith("torch"):
                    continue
                entry.load(arrays, dtype)
                poison()
                found[name] = guarded(lambda entry=entry, exact=exact: errors(entry.results(), exact))
                shown = found[name] if isinstance(found[name], str) else " ".join(f"{x:.1e}" for x in found[name])
                print(f"{size} {dtype:9} {name:12} {shown}", flush=True)
            ours, flash = found["ours"], found.get("torch flash")
            bound = 2e-6 if dtype == "float32" else 4e-3
            if isinstance(flash, list) and not isinstance(ours, str):
                good = good and all(a <= 1.1 * b for a, b in zip(ours, flash, strict=True))
            good = good and not isinstance(ours, str) and max(ours) <= bound
    print(f"errors {'in order' if good else 'NOT IN ORDER'}", flush=True)
    return good


def check_options() -> None:
    """Segments, a window, sinks, other lengths: ours beside the definition in fp32, of the same bf16 inputs."""
    draw = np.random.default_rng(1)
    arrays = [mx.array(x).astype(mx.bfloat16) for x in drawn(Size(2, 600, 4, 2, 128))]
    segments = mx.array(np.cumsum(draw.uniform(size=(2, 600)) < 0.02, axis=1).astype(np.int32))
    sinks = mx.array(draw.standard_normal(4, dtype=np.float32))
    short = [x[..., :200, :] if i in (0, 3) else x for i, x in enumerate(arrays)]
    options = {
        "segments": ({"segments": segments}, arrays),
        "segments, window, sinks": ({"segments": segments, "window": 100, "sinks": sinks}, arrays),
        "window": ({"window": 70}, arrays),
        "not causal": ({"causal": False}, arrays),
        "fewer queries": ({}, short),
    }
    for name, (given, (q, k, v, dy)) in options.items():
        found = []
        for function in (attention_naive, attention_fused, attention_blocked):
            dtype = mx.float32 if function is attention_naive else mx.bfloat16
            poison()

            def call(q, k, v, s, function=function, given=given):
                more = given | ({"sinks": s} if "sinks" in given else {})
                return [function(q, k, v, scale=128**-0.5, **more)]

            y, gradients = mx.vjp(call, [*(x.astype(dtype) for x in (q, k, v)), sinks], [dy.astype(dtype)])
            found.append([np.array(x.astype(mx.float32)) for x in (*y, *gradients)][: 5 if "sinks" in given else 4])
        for which, result in (("fused", found[1]), ("blocked", found[2])):
            print(f"{name} {which} " + " ".join(f"{x:.1e}" for x in errors(result, found[0])), flush=True)


def tiny() -> None:
    """Every kernel once, on sizes that compute-sanitizer gets through: --only tiny, without PyTorch."""
    for size, dtype in ((Size(1, 150, 2, 1, 256), "bfloat16"), (Size(1, 150, 2, 1, 128), "bfloat16"),
                        (Size(1, 150, 2, 1, 192, 128), "float16"), (Size(1, 70, 2, 1, 72), "float32")):  # fmt: skip
        arrays = [mx.array(x).astype(getattr(mx, dtype)) for x in drawn(size)]
        segments = mx.array(np.arange(size.length, dtype=np.int32)[None] // 50)
        for given in ({}, {"segments": segments, "window": 40, "sinks": mx.zeros((2,))}):
            found = []
            for function in (attention_fused, attention_naive):
                call = lambda q, k, v: [function(q, k, v, scale=0.1, **given)]  # noqa: B023, E731
                y, gradients = mx.vjp(call, arrays[:3], arrays[3:])
                found.append([np.array(x.astype(mx.float32)) for x in (*y, *gradients)])
            shown = " ".join(f"{x:.1e}" for x in errors(*found))
            print(f"{size} {dtype} {', '.join(given) or 'causal'}: {shown}", flush=True)


def same_bits(size: Size) -> None:
    entry = Mlx(attention_fused)
    entry.load(drawn(size))
    first = [np.array(x.view(mx.uint16)) for x in entry.once()]
    poison()
    again = [np.array(x.view(mx.uint16)) for x in entry.once()]
    equal = all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    print(f"{size}: two runs give {'the same bits' if equal else 'OTHER BITS'}", flush=True)


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
