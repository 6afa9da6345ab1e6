"""Counts the live buffers of training steps in MLX's own allocator and prints them as JSON; test_buffers.py runs it.

The arguments are a family and two depths. The cases are the second depth without checkpoints, and both with them.
For each case, `kept` is the number of buffers that a compiled micro-batch leaves behind, which are constants of its
trace. `beyond` is the most that any later step holds besides parameters, gradients and moments.
"""

import contextlib
import gc
import json
import sys
from pathlib import Path

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import mlx.core as mx

from conftest import FAMILIES, build_model, family_config
from counted_allocator import Counter
from deltatune.layers import describe
from deltatune.machine.compiling import without_kernels
from deltatune.ops.checkpoint import checkpointed
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.patches import patched
from deltatune.plan.traced_step import blank_batch
from deltatune.train.distributed import World
from deltatune.train.setup import choose_loss, prepare
from deltatune.train.step import Step
from deltatune.train.tree import leaves
from deltatune.train.updates.optimizer import build_optimizer

LENGTH, STEPS = 48, 2


def config_of(family, depth):
    options = {"num_hidden_layers": depth}
    if family.startswith("kimi"):
        numbers = range(1, depth + 1)
        kinds = {"kda_layers": [n for n in numbers if n % 4], "full_attn_layers": [n for n in numbers if n % 4 == 0]}
        options["linear_attn_config"] = FAMILIES[family]["linear_attn_config"] | kinds
    return family_config(family, **options)


def counted(counter, described, checkpoint):
    model = build_model(described)
    # Dropout is on, so that its random keys are counted, too.
    config = TrainConfig(lora_parameters=LoraConfig(rank=2, dropout=0.2))
    prepare(model, config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(model))
        if checkpoint:
            stack.enter_context(checkpointed([layer.module for layer in describe(model)]))
        stack.enter_context(without_kernels())
        optimizer = build_optimizer(config)
        step = Step(model, optimizer, choose_loss(model)[0], World())
        model.train()
        mx.eval(model.parameters(), optimizer.state)
        return steps(counter, model, optimizer, step)


def steps(counter, model, optimizer, step):
    """Run steps as Trainer does, and count their buffers."""
    trained = len(leaves(model.trainable_parameters()))
    gc.collect()
    before = counter.now().buffers
    mx.eval(step.micro_batch(blank_batch(1, LENGTH, False), None))
    gc.collect()
    kept = counter.now().buffers - before
    peaks = []
    for _ in range(STEPS):
        counter.reset()
        loss, weight, gradients, _ = step.micro_batch(blank_batch(1, LENGTH, False), None)
        mx.eval(loss, weight, gradients)
        norm = step.update(gradients, loss, weight)
        del gradients
        mx.eval(model.trainable_parameters(), optimizer.state, norm)
        peaks.append(counter.now().peak_buffers - before - trained)
    # The first step traces the update.
    return {"kept": kept, "beyond": max(peaks[1:])}


def main():
    counter, family, (shallow, deep) = Counter(), sys.argv[1], map(int, sys.argv[2:])
    cases = [(deep, False), (shallow, True), (deep, True)]
    print(json.dumps([counted(counter, config_of(family, depth), checkpoint) for depth, checkpoint in cases]))


main()
