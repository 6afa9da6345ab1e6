"""Times linear attention (state-space duality) on an NVIDIA GPU, forward and backward, beside FLA and mamba-ssm.

usage: python -u benchmarks/linear_attention.py [--sizes BxT ...] [--heads 64] [--key-heads 8 64] [--head 64]
    [--state 128] [--profile] [--check] [--only deltatune FLA mamba-ssm chunk]

For each size it prints of each implementation, in bf16: the norm of y's and of each gradient's error on the first 512
tokens of a row against deltatune's chunk form in fp32, the median of 20 calls of the forward and the backward pass that
are waited for, the time of a call among many in a row (a replayed CUDA graph for PyTorch's), and the peak memory beyond
inputs and gradients. FLA's simple_gla has no groups: its call repeats q and k for each head of v, and sums their
gradients. mamba-ssm's call forms dt x and dt A itself. An implementation that is not installed is named and left out.
--profile prints the time of each of deltatune's kernels, which it launches alone. --check first compares the fused
kernels with `chunk` and with float64, on the classes of released models; a class that fails ends the run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import deltatune  # noqa: F401  (sets MLX's variables, so before mlx)

# isort: split
import mlx.core as mx

from deltatune.machine import backend
from deltatune.ops.gated_delta.chunk import gated_delta_chunk
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, shape_of, tiling_of
from deltatune.ops.gated_delta.fused_passes import no_initial_state
from deltatune.ops.gated_delta.trial_case import Call
from deltatune.ops.linear_attention.choice import MODELS, OPERATOR
from deltatune.ops.operator.case import judged
from deltatune.ops.operator.measure import relative_norm
from with_mlx import MLX
from with_torch import FlashLinearAttention

CALLS = 20
# The tokens of a row on which errors are taken.
COMPARED = 512
NAMES = ("y", "dq", "dk", "dv", "dlog_g")
PEERS = ("deltatune", "FLA", "mamba-ssm", "chunk")


def drawn(batch: int, length: int, key_heads: int, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return q, k, v, dt, A and dy, of which log_g is dt A: gates as a trained Mamba-2 has them."""
    draw = np.random.default_rng(0)
    heads, state = options.heads, options.state
    keys, gates = (batch, length, key_heads, state), (batch, length, heads)
    shapes = {"q": keys, "k": keys, "v": (*gates, options.head), "dy": (*gates, options.head)}
    arrays = {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    arrays["q"] *= state**-0.5
    arrays["k"] *= state**-0.5
    arrays["dt"] = np.exp(draw.uniform(np.log(1e-3), np.log(1e-1), size=gates)).astype(np.float32)
    arrays["A"] = -draw.uniform(1.0, 16.0, size=(heads,)).astype(np.float32)
    return arrays


class OfMlx(MLX):
    """An implementation f(q, k, v, log_g) in MLX."""

    def load(self, given: Any, dtype: str = "bfloat16") -> None:
        arrays = given | {"log_g": given["dt"] * given["A"]}
        kinds = {name: mx.float32 if name == "log_g" else getattr(mx, dtype) for name in ("q", "k", "v", "log_g", "dy")}
        # Every implementation gets the same numbers, those of bf16.
        rounded = {
            name: mx.array(arrays[name]).astype(mx.bfloat16 if name != "log_g" else mx.float32) for name in kinds
        }
        *self.arrays, self.dy = (rounded[name].astype(kind) for name, kind in kinds.items())
        mx.eval(self.arrays, self.dy)


class SimpleGla(FlashLinearAttention):
    """FLA's simple_gla, in chunks."""

    note: str | None = None

    def make(self) -> Callable[..., Any]:
        from fla.ops.simple_gla import chunk_simple_gla

        def function(q: Any, k: Any, v: Any, log_g: Any) -> Any:
            groups = v.shape[2] // q.shape[2]
            q, k = (x.repeat_interleave(groups, 2) if groups > 1 else x for x in (q, k))
            return chunk_simple_gla(q, k, v, log_g, scale=1.0)[0]

        return function

    def load(self, given: Any, dtype: str = "bfloat16") -> None:
        arrays = {name: given[name] for name in ("q", "k", "v")}
        # It answers once a process.
        SimpleGla.note = self.times_only() or SimpleGla.note
        self.put(arrays | {"log_g": given["dt"] * given["A"]}, given["dy"], dtype)

    def put(self, arrays: dict[str, np.ndarray], dy: np.ndarray, dtype: str) -> None:
        import torch

        self.device, self.function, kind = "cuda", self.make(), getattr(torch, dtype)
        narrow = ("q", "k", "v", "x")
        self.arrays = [
            torch.tensor(x, device="cuda").to(kind if name in narrow else torch.float32) for name, x in arrays.items()
        ]
        self.dy = torch.tensor(dy, device="cuda").to(kind)


class Mamba2(SimpleGla):
    """mamba-ssm's chunk scan, which forms dt x and dt A itself: of its gradients those of C and B are compared."""

    note = None

    def make(self) -> Callable[..., Any]:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return lambda q, k, x, dt, a: mamba_chunk_scan_combined(x, dt, a, k, q, chunk_size=256)

    def load(self, given: Any, dtype: str = "bfloat16") -> None:
        arrays = {name: given[name] for name in ("q", "k")}
        arrays |= {"x": given["v"] / given["dt"][..., None], "dt": given["dt"], "A": given["A"]}
        self.put(arrays, given["dy"], dtype)

    def scaled(self, gradients: list[Any]) -> list[Any]:
        return gradients[:2]


def check() -> None:
    """Compare the fused kernels with chunk and with float64."""
    for shape in MODELS:
        candidate = OPERATOR.candidates["fused"](Call.of_class(shape))
        assert not isinstance(candidate, str), (shape, candidate)
        assert candidate.checked is not None
        verdict = judged(OPERATOR.case_of(candidate.shape), candidate.checked, "fused")
        print(verdict)
        assert verdict.passed
    for workload in OPERATOR.workloads(False):
        candidate = OPERATOR.candidates["fused"](workload.call())
        assert not isinstance(candidate, str)
        verdict = judged(workload.case("fused"), candidate.function, "fused")
        print(verdict)
        assert verdict.passed


def measure(name: str, implementation: Any, arrays: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> None:
    """Print the errors on the first tokens, the times and the memory of an implementation at a size."""
    try:
        # The whole size comes first: Triton chooses among its configurations on the first call.
        implementation.load(arrays)
        implementation.both()
        implementation.load(beginning(arrays))
        results = [implementation.numpy(x) for x in implementation.both()]
        implementation.load(arrays)
        implementation.both()
    except (ImportError, RuntimeError, ValueError, AttributeError, TypeError, AssertionError) as error:
        print(f"  {name:20s} left out: {type(error).__name__}: {str(error).splitlines()[:1]}")
        return
    errors = {key: relative_norm(x, exact[key]) for key, x in zip(NAMES, results, strict=False)}
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        implementation.both()
        times.append(time.perf_counter() - start)
    seconds, how = implementation.in_a_row(50)
    bytes_ = implementation.excess()
    print(
        f"  {name:20s} {statistics.median(times) * 1e3:7.3f} ms waited, {seconds * 1e3:7.3f} ms in a row ({how}), "
        f"{bytes_['excess'] / 1e6:7.1f} MB beyond {bytes_['inputs'] / 1e6:.0f} of inputs and "
        f"{bytes_['gradients'] / 1e6:.0f} of gradients; errors "
        + ", ".join(f"{key} {error:.1e}" for key, error in errors.items())
        + (f" ({implementation.note})" if getattr(implementation, "note", None) else "")
    )
    implementation.release()


def beginning(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the first tokens of the first row."""
    return {name: x if x.ndim == 1 else x[:1, :COMPARED] for name, x in arrays.items()}


def exact_results(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return y and the gradients of the first tokens, by `chunk` in fp32 from the numbers of bf16."""
    reference = OfMlx(lambda *a: gated_delta_chunk(*a, None)[0])
    # On the CPU, because a GPU may multiply fp32 matrices in TF32.
    with mx.stream(mx.cpu):
        reference.load(beginning(arrays), "float32")
        return dict(zip(NAMES, map(reference.numpy, reference.both()), strict=True))


def profile(arrays: dict[str, np.ndarray]) -> None:
    """Print the time of each of deltatune's kernels."""
    ours = OfMlx(gated_delta_fused)
    ours.load(arrays)
    x = dict(zip(("q", "k", "v", "log_g"), ours.arrays, strict=True)) | {"dy": ours.dy, "initial": no_initial_state()}
    options = {"masked": False, "segmented": False, "per_channel": False, "erases": False}
    tiling = tiling_of(backend.device(), shape_of(x["k"], x["v"]), mx.bfloat16, **options)
    assert tiling is not None
    x["d_last"] = mx.zeros((x["v"].shape[0], *x["v"].shape[2:], x["k"].shape[3]))
    print(f"  {tiling}")
    for phase in ("prepare", "scan", "reverse", "gradients"):
        x |= tiling.run(phase, x)
        mx.eval(list(x.values()))
        mx.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            mx.async_eval(list(tiling.run(phase, x).values()))
        mx.synchronize()
        print(f"    {phase:10s} {(time.perf_counter() - start) / 50 * 1e3:7.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1x8192", "2x2048"])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--key-heads", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--head", type=int, default=64)
    parser.add_argument("--state", type=int, default=128)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=PEERS)
    options = parser.parse_args()
    print(f"deltatune on {backend.device()}: {mx.device_info()}")
    if options.check:
        check()
    implementations = {
        "deltatune": lambda: OfMlx(lambda *a: gated_delta_fused(*a, None)[0]),
        "FLA": SimpleGla,
        "mamba-ssm": Mamba2,
        "chunk": lambda: OfMlx(lambda *a: gated_delta_chunk(*a, None)[0]),
    }
    for key_heads in options.key_heads:
        for size in options.sizes:
            batch, length = map(int, size.split("x"))
            print(f"B{batch} T{length}, {options.heads} heads of {options.head}, states of {options.state}, ", end="")
            print(f"{key_heads} groups")
            arrays = drawn(batch, length, key_heads, options)
            exact = exact_results(arrays)
            for name in options.only:
                measure(name, implementations[name](), arrays, exact)
            if options.profile:
                profile(arrays)
            mx.clear_cache()


if __name__ == "__main__":
    main()
