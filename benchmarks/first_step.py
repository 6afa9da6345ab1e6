"""Measures the first step of deep models: what it takes and how many buffers are alive, as a whole and by layers.

usage: python benchmarks/first_step.py [--layers 40 94] [--width 256] [--tokens 128] [--dtype bfloat16] [--experts]

Each figure has a process of its own: a model of Qwen3.5's form with random weights and LoRA r=8 on every linear takes
two steps on one row, gradients alone, on the CPU. As a whole, all layers are checkpointed and compiled as one function;
by layers, one function a kind of layer is compiled. All weights stay in memory, or all layers in files. Live buffers
are those that MLX's allocator has handed out (counted_allocator.py, Linux CPUs only), the model's own left out.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx

import processes
from counted_allocator import Counter
from layers_cpu import step_of, write_model
from machine import heading
from trainers import Shape

KINDS = ("as a whole", "by layers", "by layers, from the file")


def worker(options: dict[str, Any]) -> dict[str, float]:
    """Take two steps; return what the first and the second one took."""
    shape = Shape(**{**options["shape"], "experts": options["shape"]["experts"] and tuple(options["shape"]["experts"])})
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        write_model(Path(temporary, "model"), shape)
        counter = Counter()
        step, _ = step_of(Path(temporary, "model"), options["kind"], stack)
        mx.clear_cache()
        for name in ("first", "second"):
            counter.reset()
            mx.reset_peak_memory()
            buffers, held = counter.now().buffers, mx.get_active_memory()
            started, before = time.perf_counter(), time.process_time()
            found["loss"] = step(shape)
            found[name], found[f"{name} CPU"] = time.perf_counter() - started, time.process_time() - before
            found[f"{name} buffers"] = counter.now().peak_buffers - buffers
            found[f"{name} bytes"] = mx.get_peak_memory() - held
    return found


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[40, 94])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--experts", action="store_true", help="a mixture of 16 experts, of which a token takes 4")
    options = processes.arguments(parser, worker)
    width, heads = options.width, options.width // 64
    mlp, experts = (width // 2, (16, 4)) if options.experts else (3 * width, None)
    shape = Shape("small", width, mlp, 0, (heads, heads // 2, 64), (heads, heads, 64), 2048, 1, options.tokens,
                  options.dtype, experts)  # fmt: skip
    print(f"{heading()}\n\n| layers | step | first: s | CPU s | live buffers | MB | second: s | CPU s | live buffers |")
    print("|---" * 9 + "|", flush=True)
    for layers in options.layers:
        losses = set()
        for kind in KINDS:
            task = {"shape": vars(replace(shape, layers=layers)), "kind": kind}
            found = processes.measured(__file__, task)
            losses.add(found["loss"])
            print(
                f"| {layers} | {kind} | {found['first']:.1f} | {found['first CPU']:.1f} "
                f"| {found['first buffers']:,.0f} | {found['first bytes'] / 1e6:,.1f} "
                f"| {found['second']:.1f} | {found['second CPU']:.1f} | {found['second buffers']:,.0f} |",
                flush=True,
            )
        assert len(losses) == 1, losses


if __name__ == "__main__":
    main()
