"""Measures a training step of a Qwen3.5 shape on a CPU in fp32, bf16 and 4 bits, and in bf16 without our products.

usage: python benchmarks/dtypes_cpu.py [--shape 0.8B] [--depth 24] [--tokens 256] [--steps 2] [--plain]

The model has random weights and LoRA r=8 on every linear, and trains one row. Printed are the tokens a second and the
tokens a processor second, which other programs change less, of the fastest forward and backward pass behind a first
one, and MLX's peak. --plain also trains in bf16 with MLX's own products, which takes minutes.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx

import processes
import trainers
from deltatune import patches
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train.batch_loss import arrays, mean_loss_and_gradients
from deltatune.train.compiled import Compiled
from deltatune.train.setup import prepare, training
from machine import heading

KINDS = {"fp32": ("float32", 0), "bf16": ("bfloat16", 0), "4 bits, bf16": ("bfloat16", 4)}
PLAIN = "bf16, MLX's own products"


def measured(shape: trainers.Shape, kind: str, steps: int) -> tuple[float, float, int]:
    """The seconds and processor seconds of the fastest step, and MLX's peak in bytes."""
    dtype, bits = KINDS.get(kind, KINDS["bf16"])
    model = trainers.mlx_model(shape, dtype, bits)
    config = TrainConfig(lora_parameters=LoraConfig(rank=8))
    prepare(model, config)
    if kind == PLAIN:
        patches.ON_CPU = tuple(patch for patch in patches.ON_CPU if "linear" not in patch.target)
    seconds = []
    with training(model, config, compare=False) as trained:
        model.train()
        step = Compiled(lambda batch, used: mean_loss_and_gradients(model, trained.loss, batch, used), [model.state])
        batch = arrays(trainers.batch_of(shape.rows()))
        for _ in range(1 + steps):
            start = time.perf_counter(), time.process_time()
            mx.eval(step(batch, model.trainable_parameters()))
            seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    wall, processor = map(min, zip(*seconds[1:], strict=True))
    return wall, processor, mx.get_peak_memory()


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=list(trainers.SHAPES), default="0.8B")
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--kind", help="measure this one in this process")
    options = parser.parse_args()
    shape = dataclasses.replace(trainers.SHAPES[options.shape], layers=options.depth, tokens=options.tokens, batch=1)
    if options.kind:
        wall, processor, peak = measured(shape, options.kind, options.steps)
        rates = f"{shape.tokens / wall:.1f} tokens a second, {shape.tokens / processor:.2f} a processor second"
        print(f"{options.kind}: {rates}, {peak / 1e9:.1f} GB", flush=True)
        return
    print(f"{heading()}\n{shape}", flush=True)
    command = [sys.executable, __file__, "--shape", options.shape, "--depth", options.depth]
    command += ["--tokens", options.tokens, "--steps", options.steps, "--kind"]
    for kind in [*KINDS, *([PLAIN] if options.plain else [])]:
        subprocess.run([*map(str, command), kind], check=True)


if __name__ == "__main__":
    main()
