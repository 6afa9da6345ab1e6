"""Measures a training step of a Qwen3.5 shape: tokens a second, peak memory and time to the first step.

usage: python benchmarks/training_step.py RESULTS.json [--seconds 500] [--only NAME ...] [--shape 35B-A3B] [--batch 8]

The model has random bf16 weights and LoRA r=8 on every linear, and trains with AdamW and T=2048. Each trainer has a
process of its own, one after another. Its gradients on a short batch are first compared with those of mlx-lm's own
model and loop in fp32: a trainer whose error is more than twice that of the same model and loop in bf16 gets no figure.
(transformers has other weights; tests/oracle compares it.) The time to the first step starts with the finished weights,
and includes checks and compiling. strong_stack.py says which kernels transformers is given in the entries with FLA's,
and unsloth_trainer.py how Unsloth is set up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import processes
import trainers
from machine import cpu, gpu, versions
from strong_stack import strong_stack
from tables import training_table
from trainers import SHAPES, Shape
from unsloth_trainer import unsloth

STEPS, FEW_STEPS, LONG = 8, 3, 4.0
# A trainer may be this many times as far from the truth as mlx-lm's loop is in the same dtype; and this far in any.
ALLOWED, ROUNDING = 2.0, 1e-4
# The layers and tokens whose gradients are compared: mlx-lm's loop is slow, and in fp32 a large model has no room.
COMPARED = {"0.8B": (24, 128), "35B-A3B": (4, 128), "tiny": (4, 32), "tiny experts": (4, 32)}


@dataclass(frozen=True)
class Entry:
    """A trainer to measure.

    Args:
        make: The function that sets it up.
        options: The keyword arguments of that function.
        parity: The name of the gradients that it must have; None for no comparison.
        seconds: How long its process may take.
    """

    make: Callable[..., Any]
    options: dict[str, bool]
    parity: str | None
    seconds: float


_OURS, _ARRAYS = "deltatune", "arrays with autodiff"
ENTRIES = {
    "deltatune, checkpointed": Entry(trainers.deltatune, {"checkpoint": True}, _OURS, 120),
    "deltatune": Entry(trainers.deltatune, {"checkpoint": False}, _OURS, 120),
    "transformers + PEFT, checkpointed": Entry(trainers.transformers, {"checkpoint": True}, None, 120),
    "with FLA's, Liger's and fused kernels, checkpointed": Entry(strong_stack, {"checkpoint": True}, None, 300),
    "with FLA's, Liger's and fused kernels": Entry(strong_stack, {"checkpoint": False}, None, 300),
    "with these and torch.compile": Entry(strong_stack, {"checkpoint": False, "compiled": True}, None, 300),
    "with FLA's kernels, Liger's loss and torch.compile": Entry(
        strong_stack, {"checkpoint": False, "compiled": True, "liger_in_layers": False}, None, 300
    ),
    "mlx-lm, arrays with autodiff, checkpointed, not compiled": Entry(
        trainers.mlx_lm, {"checkpoint": True, "compiled": False}, _ARRAYS, 100
    ),
    "mlx-lm, arrays with autodiff": Entry(trainers.mlx_lm, {"checkpoint": False, "compiled": True}, _ARRAYS, 150),
    "mlx-lm, arrays with autodiff, checkpointed": Entry(
        trainers.mlx_lm, {"checkpoint": True, "compiled": True}, _ARRAYS, 330
    ),
    "Unsloth, its checkpoints": Entry(unsloth, {"checkpoint": True}, None, 300),
    "Unsloth": Entry(unsloth, {"checkpoint": False}, None, 300),
}


def measure(name: str, shape: Shape) -> dict[str, Any]:
    entry = ENTRIES[name]
    with entry.make(shape, **entry.options) as trainer:
        losses = [trainer.step()]
        first = time.perf_counter() - trainer.ready
        print(json.dumps({"note": f"{name}: first step after {first:.1f} s"}), flush=True)
        trainer.step()
        trainer.reset_peak()
        times = []
        while len(times) < (STEPS if not times or times[0] < LONG else FEW_STEPS):
            start = time.perf_counter()
            losses.append(trainer.step())
            times.append(time.perf_counter() - start)
        step = statistics.median(times)
        found = {"tokens": shape.batch * shape.tokens, "step": step, "times": times, "first": first}
        return found | {"peak": trainer.peak(), "losses": losses}


def work(name: str, shape: Shape) -> None:
    """The process of one trainer, or of the comparison of gradients, which prints its record last."""
    found: dict[str, Any] = {"trainer": name}
    try:
        if name == "parity":
            from gradients import distances

            layers, tokens = COMPARED[shape.name]
            found |= {"distances": distances(replace(shape, layers=layers, batch=2), tokens)}
        else:
            found |= measure(name, shape)
    except Exception as error:  # noqa: BLE001  (whatever it is, the other trainers go on)
        found |= {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"}
    print(json.dumps(found), flush=True)


def run(name: str, shape: Shape, seconds: float) -> dict[str, Any]:
    """The record of one process, whose empty cache makes the first step include the check before first use."""
    command = [sys.executable, __file__, "--work", name, "--shape", shape.name, "--batch", str(shape.batch)]
    with (
        tempfile.TemporaryDirectory() as cache,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as complaints,
    ):
        environment = os.environ | {"DELTATUNE_CACHE": cache}
        process = subprocess.Popen(command, stdout=output, stderr=complaints, env=environment)
        late = False
        try:
            process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            process.wait()
        output.seek(0)
        # Other libraries print dictionaries of Python, which begin with another quotation mark.
        lines = [json.loads(text) for text in output if text.startswith('{"')]
        if lines and "note" not in lines[-1]:
            return lines[-1]
        if late:
            reached = f"; {lines[-1]['note']}" if lines else "; its first step was not done"
            return {"trainer": name, "failed": f"stopped after {seconds:.0f} s{reached}"}
        complaints.seek(0)
        last = complaints.read().strip().splitlines()[-1:] or [""]
        return {"trainer": name, "failed": f"exit code {process.returncode}: {last[0][:300]}"}


def disagreement(entry: Entry, distances: dict[str, float] | None, problem: str | None) -> str | None:
    """Why a trainer gets no figure, or None where it may be measured."""
    if entry.parity is None:
        return None
    if distances is None:
        return f"gradients were not compared: {problem}"
    own, loop = distances[entry.parity], distances["loop"]
    if own <= max(ALLOWED * loop, ROUNDING):
        return None
    return f"wrong: gradients are {own:.1e} off those in fp32, where mlx-lm's loop is {loop:.1e} off"


def show(record: dict[str, Any]) -> str:
    if "failed" in record:
        return f"{record['trainer']}: {record['failed']}"
    if "distances" in record:
        parts = [f"{name} {value:.2e}" for name, value in record["distances"].items()]
        return "gradients against mlx-lm's loop in fp32, norm: " + ", ".join(parts)
    peak = "-" if record["peak"] is None else f"{record['peak'] / 1e9:.1f} GB"
    rate = record["tokens"] / record["step"]
    return (
        f"{record['trainer']}: {rate:,.0f} tok/s, {record['step'] * 1e3:,.0f} ms a step, peak {peak}, first step after "
        f"{record['first']:.1f} s, losses {record['losses'][0]:.3f} to {record['losses'][-1]:.3f}"
    )


def main() -> None:
    options = parse()
    shape = replace(SHAPES[options.shape], batch=options.batch)
    if options.work:
        work(options.work, shape)
        return
    end = time.monotonic() + options.seconds
    result: dict[str, Any] = {
        "what": "training_step",
        "date": str(date.today()),
        "machine": {"gpu": gpu(), "cpu": cpu()},
        "versions": versions(),
        "shape": str(shape),
        "records": [],
    }
    print(f"{result['date']}, {gpu() or 'no GPU'}, {cpu()}; {versions()}\n{shape}", flush=True)
    parity: dict[str, Any] = {}
    if any(ENTRIES[name].parity for name in options.only):
        parity = run("parity", shape, min(120.0, options.seconds))
        print(show(parity), flush=True)
    result["parity"] = parity.get("distances")
    for name in options.only:
        entry = ENTRIES[name]
        reason = disagreement(entry, result["parity"], parity.get("failed"))
        found = {"trainer": name, "failed": reason}
        if reason is None:
            found = run(name, shape, min(entry.seconds, end - time.monotonic()))
        result["records"].append(found)
        print(show(found), flush=True)
        Path(options.results).write_text(json.dumps(result, indent=1))
    print(f"\n{training_table(result)}")


def parse() -> argparse.Namespace:
    parser = processes.parser(__doc__)
    parser.add_argument("results", nargs="?", default=os.devnull, help="the file to write, JSON")
    parser.add_argument("--seconds", type=float, default=500, help="of the whole run")
    parser.add_argument("--only", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--shape", choices=list(SHAPES), default="0.8B", help="tiny ones: for trying it on a CPU")
    parser.add_argument("--batch", type=int, default=2, help="rows of a step")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
