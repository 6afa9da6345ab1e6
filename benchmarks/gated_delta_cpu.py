"""The gated delta rule on a CPU, forward and backward, against every other implementation at hand: one table.

usage: DELTATUNE_THREADS=2 python benchmarks/gated_delta_cpu.py [--rounds 7] [--tokens 2048] [--only NAME ...]

Each implementation lives in a process of its own; rounds are interleaved, so that whatever else the machine does
falls on all of them, and medians are printed. An implementation whose outputs and gradients on the first tokens are
not those of a float64 recurrence gets no time. CPU is the time of all threads together, forward and backward: waiting
BLAS threads spin, but on a busy machine it still says more than the clock. Peaks are MLX's own count beyond the inputs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

HEADS, SIZE, CHECKED = 4, 128, 256
AGREES = 1e-4  # largest error over the largest element; others' decays from differences of sums cost about 1e-5
SLOW = ("mlx-lm loop", "mlx-lm loop, wheel's BLAS", "mlx-lm layer", "mlx-lm layer, wheel's BLAS")
FLOATS = ("q", "k", "v", "log_g", "beta")
Run = Callable[[dict[str, np.ndarray], np.ndarray], dict[str, Any]]


def inputs(tokens: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """fp32 arguments with unit keys, usual gates and betas, and the gradient of y."""
    draw = np.random.default_rng(0)
    shape = (1, tokens, HEADS, SIZE)
    q, k, v, dy = (draw.normal(size=shape) for _ in range(4))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_g = -np.exp(draw.normal(size=shape[:3]) - 3)
    beta = draw.uniform(0.05, 0.95, size=shape[:3])
    arrays = dict(zip(FLOATS, (q * SIZE**-0.5, k, v, log_g, beta), strict=True))
    return {name: x.astype(np.float32) for name, x in arrays.items()}, dy.astype(np.float32)


class MLX:
    """An implementation in MLX: f(q, k, v, log_g, beta) -> y."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    numpy = staticmethod(np.array)

    def load(self, arrays: dict[str, np.ndarray], dy: np.ndarray) -> None:
        import mlx.core as mx

        self.arrays, self.dy = [mx.array(arrays[name]) for name in FLOATS], mx.array(dy)
        mx.eval(self.arrays, self.dy)
        loss = lambda *a: (self.function(*a) * self.dy).sum()  # noqa: E731
        self.gradient = mx.grad(loss, argnums=list(range(len(FLOATS))))
        self.held = mx.get_active_memory()

    def forward(self) -> Any:
        import mlx.core as mx

        y = self.function(*self.arrays)
        mx.eval(y)
        return y

    def backward(self) -> Any:
        import mlx.core as mx

        mx.reset_peak_memory()
        gradients = self.gradient(*self.arrays)
        mx.eval(gradients)
        self.peak = mx.get_peak_memory() - self.held
        return gradients


class Torch:
    """transformers' chunk form. It scales q itself, so q comes here unscaled."""

    peak = None
    numpy = staticmethod(lambda tensor: tensor.numpy())

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or int(os.environ.get("DELTATUNE_THREADS") or os.cpu_count() or 1)

    def load(self, arrays: dict[str, np.ndarray], dy: np.ndarray) -> None:
        import torch
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

        torch.set_num_threads(self.threads)
        self.function = torch_chunk_gated_delta_rule
        self.arrays = [torch.tensor(arrays[name]) for name in FLOATS]
        self.arrays[0] = self.arrays[0] * SIZE**0.5
        self.dy = torch.tensor(dy)

    def forward(self) -> Any:
        import torch

        with torch.no_grad():
            return self.function(*self.arrays)[0]

    def backward(self) -> Any:
        arrays = [x.detach().requires_grad_() for x in self.arrays]
        self.function(*arrays)[0].backward(self.dy)
        return [arrays[0].grad * SIZE**0.5, *(x.grad for x in arrays[1:])]


class Layer:
    """A whole gated-delta layer of mlx-lm in training, its projections included: what a BLAS is for."""

    peak = None

    def load(self, arrays: dict[str, np.ndarray], dy: np.ndarray) -> None:
        import mlx.core as mx
        import mlx.nn as nn
        from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

        sizes = {"linear_num_value_heads": HEADS, "linear_num_key_heads": HEADS}
        sizes |= {"linear_key_head_dim": SIZE, "linear_value_head_dim": SIZE, "hidden_size": 1024}
        self.layer = GatedDeltaNet(TextModelArgs(model_type="qwen3_5", **sizes))
        self.layer.train()
        self.x = mx.random.normal((1, arrays["q"].shape[1], 1024))
        self.gradient = nn.value_and_grad(self.layer, lambda x: self.layer(x).square().sum())
        mx.eval(self.x, self.layer.parameters())

    def forward(self) -> None:
        import mlx.core as mx

        mx.eval(self.layer(self.x))

    def backward(self) -> None:
        import mlx.core as mx

        mx.eval(self.gradient(self.x))


def deltatune_chunk() -> MLX:
    from deltatune.ops.gated_delta import gated_delta_chunk

    return MLX(lambda *a: gated_delta_chunk(*a)[0])


def mlx_lm_loop() -> MLX:
    import mlx.core as mx
    from mlx_lm.models.gated_delta import gated_delta_ops

    return MLX(lambda q, k, v, log_g, beta: gated_delta_ops(q, k, v, mx.exp(log_g), beta)[0])


def mlx_vlm_chunked() -> MLX:
    import mlx.core as mx
    from mlx_vlm.models.qwen3_5.gated_delta import gated_delta_chunked

    state = mx.zeros((1, HEADS, SIZE, SIZE))
    return MLX(lambda q, k, v, log_g, beta: gated_delta_chunked(q, k, v, mx.exp(log_g), beta, state)[0])


IMPLEMENTATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "deltatune chunk": (deltatune_chunk, "openblas"),
    "transformers chunk (torch)": (Torch, "torch"),
    "transformers chunk (torch), one thread": (lambda: Torch(1), "torch"),
    "mlx-vlm chunked scan": (mlx_vlm_chunked, "openblas"),
    "mlx-vlm chunked scan, wheel's BLAS": (mlx_vlm_chunked, "system"),
    "mlx-lm loop": (mlx_lm_loop, "openblas"),
    "mlx-lm loop, wheel's BLAS": (mlx_lm_loop, "system"),
    "mlx-lm layer": (Layer, "openblas"),
    "mlx-lm layer, wheel's BLAS": (Layer, "system"),
}


def errors_against_float64(implementation: Any) -> float:
    """The largest error of y and of any gradient, over the largest element, on the first tokens."""
    path = Path(__file__).parent.parent / "tests/ops/gated_delta/oracle.py"
    spec = importlib.util.spec_from_file_location("oracle", path)
    assert spec is not None
    assert spec.loader is not None
    oracle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracle)
    arrays, dy = inputs(CHECKED)
    state = np.zeros((1, HEADS, SIZE, SIZE))
    truth = oracle.recurrence(arrays | {"initial_state": state}, dy, state)
    implementation.load(arrays, dy)
    results = (implementation.forward(), *implementation.backward())
    found = {name: implementation.numpy(x) for name, x in zip(("y", *FLOATS), results, strict=True)}
    return max(float(np.abs(found[name] - truth[name]).max() / np.abs(truth[name]).max()) for name in found)


def work(name: str, tokens: int) -> None:
    """The process of one implementation: says its error, then answers each line it reads with a time."""
    import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

    implementation = IMPLEMENTATIONS[name][0]()
    error = None if isinstance(implementation, Layer) else errors_against_float64(implementation)
    implementation.load(*inputs(tokens))
    print(json.dumps(error), flush=True)
    for line in sys.stdin:
        start, used = time.perf_counter(), time.process_time()
        getattr(implementation, line.strip())()
        times = time.perf_counter() - start, time.process_time() - used
        print(json.dumps([*times, implementation.peak]), flush=True)


class Worker:
    def __init__(self, name: str, tokens: int) -> None:
        blas = IMPLEMENTATIONS[name][1]
        environment = os.environ | {"DELTATUNE_BLAS": "system" if blas == "system" else "openblas"}
        command = [sys.executable, __file__, "--work", name, "--tokens", str(tokens)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.name = name
        self.error = self.read()
        self.times: dict[str, list[float]] = {"forward": [], "backward": [], "backward, CPU": []}
        self.peak: float | None = None

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: its process ended with exit code {self.process.wait()}")
        return json.loads(line)

    def run(self, what: str, keep: bool) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        seconds, used, peak = self.read()
        if keep:
            self.times[what].append(seconds)
        if keep and what == "backward":
            self.times["backward, CPU"].append(used)
            self.peak = peak

    def agrees(self) -> bool:
        return self.error is None or self.error <= AGREES


def measure(names: list[str], tokens: int, rounds: int) -> list[Worker]:
    workers = [Worker(name, tokens) for name in names]
    ready = [worker for worker in workers if worker.agrees()]
    for number in range(rounds + 1):
        for worker in ready:
            if worker.name in SLOW and number not in (1, rounds):
                continue
            for what in ("forward", "backward"):
                worker.run(what, keep=number > 0)
    for worker in workers:
        worker.process.communicate()
    return workers


def table(workers: list[Worker]) -> str:
    ours = next((worker for worker in workers if worker.name == "deltatune chunk"), None)
    lines = [
        "| implementation | forward, ms | forward + backward, ms | over ours | CPU, ms | peak, MB | error to float64 |",
        "|---|---|---|---|---|---|---|",
    ]
    for worker in workers:
        error = "-" if worker.error is None else f"{worker.error:.1e}"
        if not worker.agrees():
            lines.append(f"| {worker.name} | not timed | not timed | | | | {error}: wrong |")
            continue
        forward, both, used = (statistics.median(times) * 1e3 for times in worker.times.values())
        comparable = ours is not None and worker.error is not None
        ratio = f"{both / 1e3 / statistics.median(ours.times['backward']):.1f}x" if ours and comparable else "-"
        peak = "-" if worker.peak is None else f"{worker.peak / 1e6:.0f}"
        lines.append(f"| {worker.name} | {forward:.1f} | {both:.1f} | {ratio} | {used:.0f} | {peak} | {error} |")
    return "\n".join(lines)


def machine() -> str:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":")[1].strip() if lines else name
    return f"{name}, {os.cpu_count()} cores, {os.environ.get('DELTATUNE_THREADS') or os.cpu_count()} threads"


def versions() -> str:
    found = []
    for package in ("mlx", "mlx-lm", "mlx-vlm", "scipy-openblas32", "torch", "transformers"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--only", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.tokens)
        return
    workers = measure(options.only, options.tokens, options.rounds)
    print(f"gated delta, B1 T{options.tokens} H{HEADS} D{SIZE}, fp32, median of {options.rounds} interleaved rounds")
    print(f"(two for the slow ones). {date.today()}, {machine()}; {versions()}.\n")
    print(table(workers))


if __name__ == "__main__":
    main()
