"""Compares a training step whose layers run on pieces of the row with one on whole rows, on a CPU.

usage: python benchmarks/pieces_cpu.py [--tokens 512 2048 8192] [--layers 4] [--steps 3]

The model is the 0.8B shape of trainers.py with fewer layers, in fp32, checkpointed, with LoRA on every linear. Both
kinds of steps run in one process, in turn; the ratio is that of their fastest times. No time is printed unless the
gradients agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten

import processes
from deltatune.ops import pieces
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train.distributed import World
from deltatune.train.setup import prepare, training
from deltatune.train.step import Step
from deltatune.train.updates.optimizer import build_optimizer
from machine import heading
from trainers import SHAPES, Shape, batch_of, mlx_model


@contextmanager
def whole_rows() -> Iterator[None]:
    with patch.object(pieces, "bounds_of", lambda x: [0, x.shape[1]]):
        yield


def measure(shape: Shape, tokens: int, steps: int) -> tuple[float, float, int, float]:
    """The fastest seconds of a step in pieces and whole, the number of pieces, and how far gradients differ."""
    model = mlx_model(shape, "float32")
    config = TrainConfig(lora_parameters=LoraConfig(rank=8), num_layers=-1, grad_checkpoint=True, batch_size=1)
    prepare(model, config)
    batch = batch_of(shape.rows(tokens))
    seconds: dict[str, list[float]] = {"pieces": [], "whole": []}
    gradients: dict[str, Any] = {}
    with training(model, config, compare=False) as trained:
        model.train()
        made = {}
        for name in seconds:
            made[name] = Step(model, build_optimizer(config), trained.loss, World())
        for number in range(steps + 1):
            for name, step in made.items():
                with whole_rows() if name == "whole" else nullcontext():
                    start = time.perf_counter()
                    found = step.micro_batch(batch, step.zeros())
                    mx.eval(found)
                    if number:
                        seconds[name].append(time.perf_counter() - start)
                gradients[name] = dict(tree_flatten(found[2]))
    error = max(
        float(mx.abs(gradients["pieces"][key] - other).max() / mx.maximum(mx.abs(other).max(), 1e-20))
        for key, other in gradients["whole"].items()
    )
    width = mx.zeros((1, tokens, shape.hidden))
    return min(seconds["pieces"]), min(seconds["whole"]), len(pieces.bounds_of(width)) - 1, error


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    shape = replace(SHAPES["0.8B"], layers=arguments.layers, batch=1, vocabulary=4096)
    print(f"{heading()}; {arguments.layers} layers\n")
    print("| T | pieces | s a step | s with whole rows | ratio |\n" + "|---" * 5 + "|")
    for tokens in arguments.tokens:
        ours, whole, count, error = measure(shape, tokens, arguments.steps)
        if not error < 1e-3:
            raise SystemExit(f"T={tokens}: a gradient differs by {error:.1e} of its largest element")
        print(f"| {tokens:,} | {count} | {ours:.2f} | {whole:.2f} | {ours / whole:.2f} |", flush=True)


if __name__ == "__main__":
    main()
