"""Compares data-parallel training on several GPUs of one machine with training on one: tokens a second and losses.

usage: python benchmarks/several_gpus.py [--ranks 2] [--rows 2 4] [--backends nccl ring] [--tiny]

Every run is the whole Trainer in new processes, on the shape of Qwen3.5 0.8B with random bf16 weights and LoRA r=8 on
every linear: first one process alone, then `mlx.launch` with each backend and the same number of rows per GPU. Before
any figure, the losses of the ranks are compared in fp32 with those of one process that has the joined batch; a run
whose losses differ gets no figure. For the first number of rows, NCCL is also timed with its messages in a stream of
their own instead of the stream of the computation.
Without a GPU, --tiny --backends ring tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
from machine import cpu, gpu, versions
from trainers import RANK, SCALE, SHAPES, Shape, mlx_model

# The largest relative difference of fp32 losses that is allowed.
ALLOWED = 1e-5
WARM_UP, TIMED, COMPARED = 5, 20, 6
# Further ways to run a backend: with its messages in a stream of their own.
WAYS = {"nccl": ["own stream"]}
LAUNCH = "from mlx._distributed_utils.launch import main; main()"


def shape_of(task: dict[str, Any]) -> Shape:
    shape = SHAPES[task["shape"]]
    if task["compare"]:
        shape = replace(shape, layers=min(shape.layers, 4), tokens=min(shape.tokens, 256), dtype="float32")
    return replace(shape, batch=task["batch"])


def work(task: dict[str, Any]) -> None:
    """The process of one rank, which trains; rank 0 writes the results."""
    shape = shape_of(task)
    # The first import of deltatune, which must come before mlx.
    from deltatune.options.config import LoraConfig, TrainConfig

    # isort: split
    import mlx.core as mx
    import numpy as np

    from deltatune.data import Example, Splits
    from deltatune.train import Trainer, distributed
    from deltatune.train.reports.screen import Screen
    from deltatune.train.setup import prepare

    if task["way"] == "own stream":
        own_stream = mx.new_thread_unsafe_stream(mx.gpu)
        distributed.World._stream = lambda world: own_stream
    world = distributed.World()
    model = mlx_model(shape)
    draw = np.random.default_rng(0)
    steps = COMPARED if task["compare"] else WARM_UP + TIMED
    tokens = draw.integers(0, shape.vocabulary, size=(steps * shape.batch, shape.tokens + 1)).astype(np.int32)
    counted = np.arange(shape.tokens + 1) > 0
    splits = Splits(train=[Example(row, counted, f"row {number}") for number, row in enumerate(tokens)])
    config = TrainConfig(
        adapter_path=task["folder"],
        batch_size=shape.batch,
        max_seq_length=shape.tokens,
        iters=steps,
        learning_rate=1e-4,
        lora_parameters=LoraConfig(rank=RANK, scale=SCALE),
        steps_per_report=1,
        save_every=10**6,
        val_batches=0,
    )
    prepare(model, config)
    mx.reset_peak_memory()
    trainer = Trainer(model, None, config, splits, world=world, screen=Screen(shown=False))
    trainer.run()
    if world.main:
        used = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout if gpu() else ""  # fmt: skip
        lines = [json.loads(line) for line in Path(task["folder"], "metrics.jsonl").read_text().splitlines()]
        found = {
            "losses": [line["train_loss"] for line in lines],
            "seconds": [1 / line["iterations_per_second"] for line in lines],
            "peak": lines[-1]["peak_memory"],
            "backend": world.backend,
            "size": world.size,
            "device": f"{mx.default_device()}; memory used, all GPUs: {'; '.join(used.split(chr(10))).strip('; ')}",
        }
        Path(task["found"]).write_text(json.dumps(found))


class Clock:
    """Says how many seconds the next run may take: `each`, but all runs together no more than `total`."""

    def __init__(self, each: float, total: float):
        self._each, self._end = each, time.perf_counter() + total

    def left(self) -> float:
        return max(1.0, min(self._each, self._end - time.perf_counter()))


def run(task: dict[str, Any], backend: str | None, ranks: int, clock: Clock) -> dict[str, Any]:
    """Start a run; returns the results of rank 0, or why there are none."""
    seconds = clock.left()
    with tempfile.TemporaryDirectory() as folder:
        task = task | {"folder": f"{folder}/out", "found": f"{folder}/found.json"}
        file = Path(folder, "task.json")
        file.write_text(json.dumps(task))
        program = [__file__, str(file)]
        launch = ["-c", LAUNCH, "-n", str(ranks), "--backend", backend or "", "--python", sys.executable]
        command = [sys.executable, *program] if not backend else [sys.executable, *launch, *program]
        code, said = processes.ended(command, seconds, NCCL_DEBUG="WARN")
        if Path(task["found"]).is_file():
            return json.loads(Path(task["found"]).read_text())
        return {"failed": f"exit code {code} within {seconds:.0f} s: " + "\n    ".join(said[-15:])}


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(left - right) / abs(left) for left, right in zip(one, other, strict=True))


def named(backend: str, way: str, ranks: int) -> str:
    return f"{ranks} ranks over {backend}{', ' + way if way else ''}"


def compare(ranks: int, shape: str, ways: list[tuple[str, str]], clock: Clock) -> list[tuple[str, str]]:
    """The pairs (backend, way) whose losses equal those of one process."""
    task = {"shape": shape, "batch": 2 * ranks, "compare": True, "way": ""}
    alone = run(task, None, 1, clock)
    if "failed" in alone:
        print(f"fp32, one process: {alone['failed']}", flush=True)
        return []
    right = []
    for backend, way in ways:
        name = named(backend, way, ranks)
        found = run(task | {"way": way}, backend, ranks, clock)
        if "failed" in found:
            print(f"fp32, {name}: {found['failed']}", flush=True)
            continue
        assert (found["backend"], found["size"]) == (backend, ranks), found
        worst = difference(alone["losses"], found["losses"])
        verdict = "as" if worst <= ALLOWED else "NOT as"
        print(
            f"fp32, {name}: losses {verdict} those of one process with the joined batch: they differ by {worst:.1e} of "
            f"{alone['losses'][0]:.4f} to {alone['losses'][-1]:.4f} ({ALLOWED:.0e} allowed)",
            flush=True,
        )
        if worst <= ALLOWED:
            right.append((backend, way))
    return right


def speed(ranks: int, shape: str, rows: int, ways: list[tuple[str, str]], clock: Clock) -> None:
    alone = None
    for backend, way in [("", ""), *ways]:
        size = ranks if backend else 1
        name = f"{named(backend, way, ranks) if backend else 'one GPU'}, {rows} rows a GPU"
        started = time.perf_counter()
        task = {"shape": shape, "batch": rows * size, "compare": False, "way": way}
        found = run(task, backend, size, clock)
        if "failed" in found:
            print(f"{name}: {found['failed']}", flush=True)
            continue
        times = found["seconds"][WARM_UP:]
        step = statistics.median(times)
        rate = rows * size * SHAPES[shape].tokens / step
        alone = alone if backend else rate
        ratio = f", {rate / alone:.2f} times one GPU" if alone and backend else ""
        print(
            f"{name}: {rate:,.0f} tok/s{ratio}; a step takes {step * 1000:.1f} ms (median of {len(times)}, "
            f"{min(times) * 1000:.1f} to {max(times) * 1000:.1f}); peak {found['peak']:.1f} GB a GPU; loss "
            f"{found['losses'][0]:.4f} to {found['losses'][-1]:.4f}; {found['device']}; the whole run took "
            f"{time.perf_counter() - started:.0f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4], help="rows of 2048 tokens a GPU")
    parser.add_argument("--backends", nargs="+", default=["nccl", "ring"])
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--seconds", type=float, default=100, help="at most this long for one run")
    parser.add_argument("--total", type=float, default=400, help="at most this long for all runs together")
    options = parser.parse_args()
    shape, clock = "tiny" if options.tiny else "0.8B", Clock(options.seconds, options.total)
    print(f"{gpu() or cpu()}; {versions()}\n{str(SHAPES[shape]).rsplit(' batch', 1)[0]}", flush=True)
    plain = [(backend, "") for backend in options.backends]
    others = [(backend, way) for backend in options.backends for way in WAYS.get(backend, []) if gpu()]
    right = compare(options.ranks, shape, plain + others, clock)
    for number, rows in enumerate(options.rows):
        speed(options.ranks, shape, rows, [way for way in right if number == 0 or way in plain], clock)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        work(json.loads(Path(sys.argv[1]).read_text()))
    else:
        main()
