"""Compares the gradient kernel of Hopper with the one for all NVIDIA GPUs, from the same scans, and times every launch.

usage: python benchmarks/gated_delta_kernels.py [--rows N ...] [--calls 10]

For each size it runs the preparation and the two scans, then both gradient kernels on what these saved: how far apart
their results are (the norm of the difference, relative to that of the results), whether two runs of Hopper's give the
same bits, and the time of each launch, many in a row.
"""

from __future__ import annotations

import time

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx

import processes
from deltatune.ops.gated_delta import fused, hopper_gradients
from deltatune.ops.gated_delta.fused import KernelInputs
from deltatune.ops.gated_delta.fused_op import tiling_of
from deltatune.ops.kernels.launch import Arrays, Launch
from machine import gpu, versions
from sizes import Inputs, Size, inputs

TABLE = (
    Size(2, 2048, 16, 16),
    Size(1, 8192, 16, 32),
    Size(1, 65536, 16, 32),
    Size(1, 8192, 16, 48),
    Size(1, 8192, 16, 64),
)
# Two kernels may differ by the rounding of a result to bf16, and of fp32 sums in another order.
APART = {"dq": 2e-3, "dk": 2e-3, "d_log_g": 5e-4, "d_beta": 2e-5}


def arrays(drawn: Inputs) -> dict[str, mx.array]:
    found = {name: mx.array(x) for name, x in (drawn.arrays | {"dy": drawn.dy}).items()}
    for name, x in found.items():
        x = x if name in ("log_g", "beta") else x.astype(mx.bfloat16)
        found[name] = mx.contiguous(mx.tile(x, (*drawn.times, *[1] * (x.ndim - 2))))
    mx.eval(found)
    return found


def launches(size: Size) -> dict[str, Launch]:
    """The launches of a forward and backward pass, and Hopper's. The scans have run, so that any may run again."""
    shape = (size.batch, size.tokens, size.key_heads, size.value_heads, size.head_size, size.head_size)
    tiling = tiling_of("cuda", shape, mx.bfloat16, masked=False, segmented=False, per_channel=False)
    if tiling is None or not hopper_gradients.serves(tiling):
        raise SystemExit(f"{size}: Hopper's kernel does not serve this size on {gpu()}")
    given = arrays(inputs(size))
    dy = given.pop("dy")
    x = KernelInputs(*given.values(), fused.no_initial_state(), None, None)
    prepare = fused.prepare(tiling, x)
    prepared = dict(zip(fused.PREPARED, prepare.run(), strict=True))
    scan = fused.scan(tiling, x, prepared)
    _, states, u, last = scan.run()
    reverse = fused.reverse(tiling, x, prepared, dy, mx.zeros_like(last))
    d_states, d_right, _, _ = reverse.run()
    scanned: Arrays = {"factors": prepared["factors"], "states": states, "d_states": d_states, "u": u}
    scanned |= {"d_right": d_right, "dy": dy}
    mx.eval(scanned)
    found = {"prepare": prepare, "scan": scan, "reverse": reverse, "gradients": fused.gradients(tiling, x, scanned)}
    return found | {"Hopper's": hopper_gradients.gradients(tiling, x, scanned)}


def compare(size: Size, usual: Launch, hopper: Launch) -> None:
    first, again, expected = hopper.run(), hopper.run(), usual.run()
    mx.eval(first, again, expected)
    same = all(mx.array_equal(x.view(mx.uint16), y.view(mx.uint16)).item() for x, y in zip(first, again, strict=True))
    shown, good = [], same
    for name, one, other in zip(usual.outputs, first, expected, strict=True):
        one, other = one.astype(mx.float32), other.astype(mx.float32)
        apart = (mx.linalg.norm(one - other) / mx.linalg.norm(other)).item()
        good = good and apart <= APART[name]
        shown.append(f"{name} {apart:.1e}")
    print(f"{size}: apart by {', '.join(shown)}; {'same bits' if same else 'OTHER BITS'}; {'ok' if good else 'WRONG'}")


def milliseconds(launch: Launch, calls: int) -> float:
    mx.eval([launch.run() for _ in range(2)])
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        mx.eval([launch.run() for _ in range(calls)])
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e3


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(TABLE))), help="which sizes of the table")
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    print(gpu(), versions(), flush=True)
    for size in (TABLE[row] for row in options.rows):
        found = launches(size)
        compare(size, found["gradients"], found["Hopper's"])
        times = [f"{name} {milliseconds(launch, options.calls):.3f}" for name, launch in found.items()]
        print(f"{size}: ms a launch: {', '.join(times)}", flush=True)
        mx.clear_cache()


if __name__ == "__main__":
    main()
