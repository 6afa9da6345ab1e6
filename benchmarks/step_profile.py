"""Shows where the time of a training step goes on an NVIDIA GPU: by kernel, and by the CUDA calls of the CPU.

usage: python benchmarks/step_profile.py [--shape 0.8B] [--checkpoint] [--batch 2] [--tokens 2048] [--waits]
       [--optimizer adamw8bit]

PyTorch's profiler records what MLX launches, so PyTorch with CUDA must be installed beside MLX. The table of kernels
gives how often each runs in a step, its time and its share; the table of calls gives the time that the CPU spent in
each. The GPU is busy while at least one kernel runs, which is compared with the time of a step without the profiler;
the sum of the kernels' times is more, since some overlap. With --waits, no step starts before the one before is done.
--bits 4 trains on packed weights, and --kind full all weights.
--again N computes cheap operators again in the backward pass, and N layers, as `grad_checkpoint: auto` may choose.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import processes
import trainers
from machine import heading


def recorded(trainer: Any, steps: int) -> list[dict[str, Any]]:
    """Run some steps under PyTorch's profiler and return the complete events of its trace."""
    from torch.profiler import ProfilerActivity, profile

    # A step that was started early belongs to no recorded one, as the last recorded one starts another.
    trainer.settle()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            trainer.step()
        trainer.settle()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def short(name: str) -> str:
    """Return a kernel's name without its parameters and name spaces, at most 90 characters long."""
    name = re.sub(r"mlx::core::|cu::|\(anonymous namespace\)::|void ", "", name)
    return name[:90]


def busy(events: list[dict[str, Any]], steps: int) -> tuple[float, float]:
    """Return for how many milliseconds of a step an event runs, and how long the longest time without one is."""
    length = longest = 0.0
    end = None
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if end is not None and start > end:
            longest = max(longest, start - end)
        length += max(0.0, stop - (start if end is None else max(start, end)))
        end = stop if end is None else max(stop, end)
    return length / steps / 1e3, longest / 1e3


def table(title: str, events: list[dict[str, Any]], steps: int, rows: int) -> None:
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        times[short(event["name"])] += event["dur"]
        counts[short(event["name"])] += 1
    whole = sum(times.values()) / steps / 1e3
    print(f"\n{title}: {sum(counts.values()) / steps:,.0f} a step, {whole:.1f} ms a step")
    print("| ms a step | count a step | us each | name |\n|---|---|---|---|")
    for name, time_ in times.most_common(rows):
        print(f"| {time_ / steps / 1e3:.2f} | {counts[name] / steps:.0f} | {time_ / counts[name]:.1f} | `{name}` |")


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=list(trainers.SHAPES), default="0.8B")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--optimizer", default="adamw", help="such as adamw8bit")
    parser.add_argument("--again", type=int, help="how many layers are recomputed, beside cheap operators")
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--bits", type=int, default=0, help="of packed weights; 0 for those of the shape")
    parser.add_argument("--kind", choices=["lora", "dora", "full"], default="lora", help="what trains")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=25)
    options = parser.parse_args()
    changes = {name: getattr(options, name) for name in ("batch", "tokens", "layers") if getattr(options, name)}
    shape = replace(trainers.SHAPES[options.shape], **changes)
    torch.cuda.init()
    print(f"{heading()}\n{shape}", flush=True)
    given = {name: getattr(options, name) for name in ("checkpoint", "waits", "bits", "again")}
    trained = {"fine_tune_type": options.kind, "optimizer": options.optimizer}
    with trainers.deltatune(shape, **given, **trained) as trainer:
        for _ in range(3):
            trainer.step()
        trainer.reset_peak()
        times = []
        for _ in range(12):
            start = time.perf_counter()
            trainer.step()
            times.append(time.perf_counter() - start)
        step = statistics.median(times)
        peak = trainer.peak() or 0
        events = recorded(trainer, options.steps)
    rate = shape.batch * shape.tokens / step
    print(f"{step * 1e3:.1f} ms a step, {rate:,.0f} tokens/s, peak {peak / 1e9:.2f} GB")
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    table("Kernels", kernels, options.steps, options.rows)
    table("Calls of the CPU", calls, options.steps, options.rows)
    runs, longest = busy(kernels, options.steps)
    print(f"\nGPU busy {runs:.1f} of {step * 1e3:.1f} ms; the longest gap is {longest:.2f} ms")


if __name__ == "__main__":
    main()
