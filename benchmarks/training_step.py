"""Measures a training step of a Qwen3.5 shape: tokens a second, peak memory and time to the first step.

usage: python benchmarks/training_step.py RESULTS.json [--seconds 500] [--only NAME ...] [--shape 35B-A3B] [--batch 8]

The model has random bf16 weights and LoRA r=8 on every linear, and trains with AdamW and T=2048. Each trainer has a
process of its own, one after another. Its gradients on a short batch are first compared with those of mlx-lm's own
model and loop in fp32: a trainer whose error is more than twice that of the same model and loop in bf16 gets no figure.
(transformers has other weights; tests/oracle compares it.) The error is the norm of the difference, divided by the norm
of the reference, over all adapters together. The time to the first step starts with the finished weights, and includes
checks and compiling. strong_stack.py says which kernels transformers is given in the entries with FLA's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

import processes
import trainers
from machine import cpu, gpu, versions
from strong_stack import strong_stack
from tables import training_table
from trainers import RANK, SCALE, SHAPES, Shape

STEPS, FEW_STEPS, LONG = 8, 3, 4.0
# A trainer may be this many times as far from the truth as mlx-lm's loop is in the same dtype; and this far in any.
ALLOWED, ROUNDING = 2.0, 1e-4
# The layers and tokens whose gradients are compared: mlx-lm's loop is slow, and in fp32 a large model has no room.
COMPARED = {"0.8B": (24, 128), "35B-A3B": (4, 128), "tiny": (4, 32), "tiny experts": (4, 32)}


@dataclass(frozen=True)
class Entry:
    """A trainer to measure: how to set it up, whether its gradients are compared, and the seconds of its process."""

    make: Callable[..., Any]
    checkpoint: bool
    compared: bool
    seconds: float


ENTRIES = {
    "deltatune, checkpointed": Entry(trainers.deltatune, True, True, 120),
    "deltatune": Entry(trainers.deltatune, False, True, 120),
    "with FLA's, Liger's and fused kernels, checkpointed": Entry(strong_stack, True, False, 300),
    "with FLA's, Liger's and fused kernels": Entry(strong_stack, False, False, 300),
}
Gradients = dict[str, np.ndarray]


def measure(name: str, shape: Shape) -> dict[str, Any]:
    entry = ENTRIES[name]
    with entry.make(shape, entry.checkpoint) as trainer:
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


def distances(shape: Shape, tokens: int) -> dict[str, float]:
    """The errors of mlx-lm's loop and of deltatune in the shape's dtype, against the loop in fp32."""
    rows = shape.rows(tokens)
    truth = of_mlx_lm(shape, rows, "float32")
    found = {"loop": of_mlx_lm(shape, rows, shape.dtype), "deltatune": of_deltatune(shape, rows)}
    return {name: _distance(gradients, truth) for name, gradients in found.items()}


def of_mlx_lm(shape: Shape, rows: np.ndarray, dtype: str) -> Gradients:
    model = trainers.mlx_model(shape, dtype)
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.tuner.trainer import default_loss
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model.freeze()
    linear_to_lora_layers(model, shape.layers, {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    _draw_adapters(model)
    model.train()
    lengths = mx.array([[0, rows.shape[1] - 1]] * len(rows))
    (_, _), gradients = nn.value_and_grad(model, default_loss)(model, mx.array(rows), lengths)
    return _flat(gradients)


def of_deltatune(shape: Shape, rows: np.ndarray) -> Gradients:
    """The gradients of the patched, checkpointed and compiled step."""
    model = trainers.mlx_model(shape)
    import mlx.core as mx

    from deltatune.lora import convert_to_lora
    from deltatune.options.config import LoraConfig, TrainConfig
    from deltatune.train.batch_loss import arrays, mean_loss_and_gradients
    from deltatune.train.setup import training

    convert_to_lora(model, LoraConfig(rank=RANK, scale=SCALE), num_layers=-1)
    _draw_adapters(model)
    with training(model, TrainConfig(grad_checkpoint=True), compare=False) as trained:
        loss = trained.loss
        model.train()
        step: Callable = mx.compile(lambda batch: mean_loss_and_gradients(model, loss, batch), inputs=[model.state])
        _, _, gradients = step(arrays(trainers.batch_of(rows)))
        return _flat(gradients)


def _draw_adapters(model: Any) -> None:
    """Draw lora_b, since its usual start at zero would leave lora_a without a gradient."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    drawn = []
    for number, (name, x) in enumerate(sorted(tree_flatten(model.trainable_parameters()))):
        draw = np.random.default_rng(number)
        drawn.append((name, mx.array(draw.normal(size=x.shape).astype(np.float32) * 0.02).astype(x.dtype)))
    model.update(tree_unflatten(drawn))


def _flat(gradients: Any) -> Gradients:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    wide = [(name, x.astype(mx.float32)) for name, x in tree_flatten(gradients)]
    mx.eval([x for _, x in wide])
    return {name: np.array(x) for name, x in wide}


def _distance(found: Gradients, truth: Gradients) -> float:
    if found.keys() != truth.keys():
        raise ValueError(f"not the same adapters: {sorted(found.keys() ^ truth.keys())[:4]}")
    apart = sum(float(np.square(found[name] - truth[name]).sum()) for name in truth)
    return (apart / sum(float(np.square(x).sum()) for x in truth.values())) ** 0.5


def work(name: str, shape: Shape) -> None:
    """The process of one trainer, or of the comparison of gradients, which prints its record last."""
    found: dict[str, Any] = {"trainer": name}
    try:
        if name == "parity":
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
    with tempfile.TemporaryDirectory() as cache:
        code, said = processes.ended(command, seconds, DELTATUNE_CACHE=cache)
    # Other libraries print dictionaries of Python, which begin with another quotation mark.
    lines = [json.loads(text) for text in said if text.startswith('{"')]
    if lines and "note" not in lines[-1]:
        return lines[-1]
    if code == -signal.SIGKILL:
        reached = f"; {lines[-1]['note']}" if lines else "; its first step was not done"
        return {"trainer": name, "failed": f"stopped after {seconds:.0f} s{reached}"}
    return {"trainer": name, "failed": f"exit code {code}: {''.join(said[-1:])[:300]}"}


def disagreement(entry: Entry, distances: dict[str, float] | None, problem: str | None) -> str | None:
    """Why a trainer gets no figure, or None where it may be measured."""
    if not entry.compared:
        return None
    if distances is None:
        return f"gradients were not compared: {problem}"
    own, loop = distances["deltatune"], distances["loop"]
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
    if any(ENTRIES[name].compared for name in options.only):
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
