"""Climbs from the gated delta rule as it is written down to its fastest kernels, and times every step.

usage: python benchmarks/ladder.py [--size 1x2048x4/4] [--head-size 128] [--tiny]

Steps, each forward alone: `naive` is the definition, a token after another in MLX's operations. `chunk` does a chunk of
tokens in matrix products. `scan` is one kernel of fifty lines (ladder_scan.h), which goes token after token again but
keeps its states in registers. `three phases` does chunks within kernels: in parallel, then the states in order, then
outputs; the last two share a launch. `Hopper` is the same on Hopper's asynchronous products. A step whose results
differ from those of `naive` gets no time. Without a GPU the kernels run on the tests' host machine, which computes what
a GPU would and takes thousands of times as long, so they run on few tokens; their times there say nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx

from deltatune.machine import backend, nvidia
from deltatune.ops.gated_delta.fused import FILES
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_on
from deltatune.ops.gated_delta.naive import gated_delta_naive
from deltatune.ops.gated_delta.tiling import choose_tiling
from deltatune.ops.gated_delta.triangular import unit_lower_inverse
from deltatune.ops.kernels.cubin import CubinKernel
from deltatune.ops.kernels.launch import Device, Kernel, Launch, header, on
from machine import heading
from sizes import FLOATS, TINY, Size, inputs
from verify import AGREES

HERE = Path(__file__).parent
TEXT = (HERE / "ladder_scan.h").read_text(encoding="utf-8")
CHUNK = 64
SCAN = Kernel(
    name="ladder_scan",
    files=(),
    values=("DK", "DV", "HK", "HV"),
    sizes=("q_shape[1]",),
    arrays=("q", "k", "v", "log_g", "beta", "y"),
    memory="LadderMemory",
    memory_values=("DK",),
)
# The size that the host machine runs.
ON_HOST = TINY[0]


def naive(q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array) -> mx.array:
    """The definition, S <- S exp(log_g); S <- S + beta (v - S k) k^T; y = S q: T steps of some small operations."""
    return gated_delta_naive(q, k, v, log_g, beta)[0]


def chunk(q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array) -> mx.array:
    """T / 64 steps of matrix products, since what a token writes depends linearly on what those before it wrote.

    What token i of a chunk writes, u_i k_i^T, follows from the state S before the chunk and from u_j of j < i:
    u_i = beta_i (v_i - e^(g_1 + ... + g_i) S k_i - sum over j < i of e^(g_j+1 + ... + g_i) (k_i . k_j) u_j).

    So (I + A) u is known, with A strictly lower triangular, and one inverse gives all u of the chunk. The derivation is
    in src/deltatune/ops/gated_delta/README.md; ops/gated_delta/chunk.py is this with a backward pass.
    """
    batch, length, heads, size = v.shape
    q, k = (mx.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    # [B, H, T', D], padded with tokens that change nothing.
    padding = [(0, 0), (0, 0), (0, -length % CHUNK)]
    q, k, v = (mx.pad(x.astype(mx.float32).swapaxes(1, 2), [*padding, (0, 0)]) for x in (q, k, v))
    log_g, beta = (mx.pad(x.astype(mx.float32).swapaxes(1, 2), padding) for x in (log_g, beta))
    below, state, outputs = mx.tril(mx.ones((CHUNK, CHUNK)), -1), mx.zeros((batch, heads, size, k.shape[-1])), []
    for start in range(0, q.shape[2], CHUNK):
        q_, k_, v_, g, b = (x[:, :, start : start + CHUNK] for x in (q, k, v, log_g, beta))
        # decay[i, j]: the gates after token j up to token i. Each is a sum of its own: differences lose digits.
        decay = mx.exp(mx.cumsum(g[..., None] * below, axis=-2)) * (below + mx.eye(CHUNK))
        since_start, until_end = mx.exp(mx.cumsum(g, axis=-1))[..., None], decay[..., -1, :, None]
        held = since_start * (k_ @ state.swapaxes(-1, -2))
        solve = unit_lower_inverse(b[..., None] * below * decay * (k_ @ k_.swapaxes(-1, -2)))
        u = solve @ (b[..., None] * (v_ - held))
        within = (decay * (q_ @ k_.swapaxes(-1, -2))) @ u
        outputs.append(since_start * (q_ @ state.swapaxes(-1, -2)) + within)
        state = since_start[..., -1:, :] * state + (u * until_end).swapaxes(-1, -2) @ k_
    return mx.concatenate(outputs, axis=2)[:, :, :length].swapaxes(1, 2)


def scan(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, execute: Device | None = None
) -> mx.array:
    """T steps again, but in one launch: a state never leaves its lanes' registers."""
    sizes = {"DK": k.shape[3], "DV": v.shape[3], "HK": k.shape[2], "HV": v.shape[2]}
    launch = Launch(
        kernel=SCAN,
        inputs={"q": q, "k": k, "v": v, "log_g": log_g, "beta": beta},
        outputs={"y": (v.shape, mx.float32)},
        values=dict(sizes),
        blocks=(-(-v.shape[3] // 32), v.shape[2], v.shape[0]),
        bytes=2 * 4 * k.shape[3],
        groups=1,
    )
    return (execute or on_gpu)(launch)[0]


def on_gpu(launch: Launch) -> list[mx.array]:
    """Run a launch of ladder_scan.h on MLX's device."""
    names, text = (tuple(launch.inputs), tuple(launch.outputs)), header(backend.device(), ()) + TEXT
    if backend.device() == "cuda":
        kernel: Any = CubinKernel(launch.name, *names, launch.source, text, launch.bytes)
    else:
        kernel = mx.fast.metal_kernel(launch.name, *map(list, names), launch.source, text)
    (x, y, z), threads = launch.blocks, launch.groups * 32
    shapes, dtypes = zip(*launch.outputs.values(), strict=True)
    results: list[mx.array] = kernel(
        inputs=list(launch.inputs.values()),
        output_shapes=list(shapes),
        output_dtypes=list(dtypes),
        grid=(x * threads, y, z),
        threadgroup=(threads, 1, 1),
        template=list(launch.values.items()),
    )
    return results


def three_phases(*arrays: mx.array, execute: Device = Launch.run) -> mx.array:
    """`chunk` in kernels: all chunks at once, then the loop over states, a block for each slice of their rows."""
    on_host = execute is not Launch.run

    def tiling(shape: Any, dtype: mx.Dtype, **options: bool) -> Any:
        return choose_tiling("metal" if on_host else backend.device(), shape, dtype, masked=False, segmented=False)

    with on(execute if on_host else None):
        return gated_delta_fused(*arrays, tiling_of_call=tiling)[0]


def hopper(*arrays: mx.array) -> mx.array:
    """The same for Hopper: groups of warps that load, and others that multiply what was loaded meanwhile."""
    return gated_delta_fused(*arrays, tiling_of_call=tiling_on("cuda"))[0]


def host(folder: str) -> Device:
    """What runs launches without a GPU: the host machine of tests/ops/kernels, which needs clang or ziglang."""
    sys.path.insert(0, str(HERE.parent / "tests" / "ops" / "kernels"))
    import host_machine

    machine = host_machine.HostMachine(Path(folder), header("metal", FILES) + TEXT)
    return machine.run


def steps(size: Size, folder: str) -> list[tuple[str, Callable[..., mx.array] | str, Size]]:
    """The steps from the bottom up: a name, a function or why there is none here, and the size that it runs at."""
    if backend.device() == "cpu":
        machine = host(folder)
        kernels: list[Any] = [partial(scan, execute=machine), partial(three_phases, execute=machine)]
        names, at = ["scan, host machine", "three phases, host machine"], replace(ON_HOST, dtype=size.dtype)
    else:
        kernels, names, at = [scan, three_phases], ["scan", "three phases"], size
    on_hopper = backend.device() == "cuda" and nvidia.generation() == nvidia.HOPPER
    last: Any = hopper if on_hopper else "needs an NVIDIA GPU of the Hopper generation"
    return [
        ("naive", naive, size),
        ("chunk", chunk, size),
        *((name, kernel, at) for name, kernel in zip(names, kernels, strict=True)),
        ("Hopper", last, size),
    ]


def climb(size: Size, rounds: int = 3) -> list[tuple[str, str, float | None, float | None, str]]:
    """Return for each step its name, its size, its error, the milliseconds of the best of `rounds`, and a remark."""
    rows: list[tuple[str, str, float | None, float | None, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, step, at in steps(size, folder):
            if isinstance(step, str):
                rows.append((name, str(at), None, None, step))
                continue
            given = inputs(at)
            kinds = {name: mx.float32 if name == "log_g" else getattr(mx, at.dtype) for name in FLOATS}
            arrays = [mx.array(given.arrays[name]).astype(kind) for name, kind in kinds.items()]
            truth, found = (function(*arrays).astype(mx.float32) for function in (naive, step))
            error = (mx.linalg.norm(found - truth) / mx.linalg.norm(truth)).item()
            if not error <= AGREES[at.dtype]:
                rows.append((name, str(at), error, None, "differs from naive: no time"))
                continue
            best = float("inf")
            for _ in range(rounds):
                started = time.perf_counter()
                mx.eval(step(*arrays))
                best = min(best, time.perf_counter() - started)
            rows.append((name, str(at), error, best * 1e3, (step.func if isinstance(step, partial) else step).__doc__))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=Size.written, default=Size.written("1x2048x4/4"))
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--tiny", action="store_true", help="the size of the tests")
    options = parser.parse_args()
    size = replace(options.size, head_size=options.head_size)
    size = replace(size, dtype="float32" if backend.device() == "cpu" else "bfloat16")
    print(f"{heading()}\n\n| step | size | error | ms | what it does |\n" + "|---" * 5 + "|", flush=True)
    for name, at, error, ms, remark in climb(TINY[0] if options.tiny else size):
        figures = ["-" if error is None else f"{error:.1e}", "-" if ms is None else f"{ms:,.2f}"]
        print(f"| {name} | {at} | {' | '.join(figures)} | {remark.splitlines()[0]} |", flush=True)


if __name__ == "__main__":
    main()
