"""Measures the peak memory of a training step by depth, to show whether checkpointing holds one layer at a time.

usage: python benchmarks/depth.py [--family qwen3_5] [--depths 2 4 8 16] [--tokens 512] [--eager] [--limit]

Every figure is the peak of the second step in a new process, with LoRA r=8 on every linear, AdamW, the chunked
vocabulary loss and deltatune's gated delta. The figure leaves out what exists before the step (weights, adapters,
moments), the gradients and one activation a layer; the rest should not grow with depth. There is no figure unless the
gradients equal those of a run without checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import processes
from machine import heading
from trainers import Shape

HIDDEN = 256
MEBI = 1e6
METHODS = ("none", "mx.checkpoint", "deltatune")
WIDTHS = (20, 1)


def config(family: str, depth: int) -> dict[str, Any]:
    """The config.json of a small model of this many layers, in which every second one is attention."""
    is_mixture = family.endswith("moe")
    mlp, experts = (256, (8, 2)) if is_mixture else (1024, None)
    shape = Shape("small", HIDDEN, mlp, depth, (4, 2, 64), (2, 4, 64), 512, 1, 512, "float32", experts, interval=2)
    return {"model_type": family, "text_config": shape.config() | {"model_type": f"{family}_text"}}


def build(options: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """A random model with adapters, and its loss on random tokens."""
    import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

    # isort: split
    import mlx.core as mx

    from deltatune.lora import convert_to_lora
    from deltatune.models.head import split_head
    from deltatune.models.load import new_model
    from deltatune.ops.cross_entropy import linear_cross_entropy
    from deltatune.options.config import LoraConfig

    model = new_model(config(options["family"], options["depth"]))
    convert_to_lora(model, LoraConfig(rank=8))
    model.train()
    split = split_head(model)
    tokens = mx.random.randint(0, 512, (1, options["tokens"]))
    mx.eval(tokens)

    def loss() -> mx.array:
        total, count = linear_cross_entropy(split.head, split.backbone(tokens), tokens, mx.ones(tokens.shape))
        return total / count

    return model, loss


def worker(options: dict[str, Any]) -> dict[str, float]:
    model, loss = build(options)
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten

    from deltatune.patches import patched

    def gradients(method: str) -> list[mx.array]:
        with recomputing(method, model):
            return [grad for _, grad in tree_flatten(nn.value_and_grad(model, loss)())]

    optimizer = optim.AdamW(1e-5, bias_correction=True)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]
    mx.eval(state)
    with patched(model):
        if options["check"]:
            for got, expected in zip(gradients(options["method"]), gradients("none"), strict=True):
                if not mx.array_equal(got, expected):
                    raise SystemExit(f"{options}: a gradient differs from the one without checkpoints")
        with recomputing(options["method"], model):

            def step() -> mx.array:
                value, grads = nn.value_and_grad(model, loss)()
                optimizer.update(model, grads)
                return value

            if not options["eager"]:
                step = mx.compile(step, inputs=state, outputs=state)
            if options["limit"]:
                mx.set_memory_limit(1)
            for _ in range(2):
                mx.clear_cache()
                mx.reset_peak_memory()
                before = mx.get_active_memory()
                mx.eval(step(), state)
    adapters = sum(array.nbytes for _, array in tree_flatten(model.trainable_parameters()))
    activations = options["depth"] * options["tokens"] * HIDDEN * 4
    peak = mx.get_peak_memory() - before
    return {"peak": peak, "gradients": adapters, "activations": activations}


def recomputing(method: str, model: Any) -> AbstractContextManager:
    if method == "none":
        return nullcontext()
    if method == "deltatune":
        from deltatune.ops.checkpoint import checkpointed

        return checkpointed(model.layers)
    from mlx_lm.tuner.trainer import grad_checkpoint

    grad_checkpoint(model.layers[0])
    return nullcontext()


def measure(family: str, depth: int, method: str, width: int, arguments: argparse.Namespace) -> float:
    """Peak memory of a new process in MB, without what exists before the step, gradients and one activation a layer."""
    options = {"family": family, "depth": depth, "method": method, "tokens": arguments.tokens}
    options |= {"eager": arguments.eager, "limit": arguments.limit, "check": depth == min(arguments.depths)}
    found = processes.measured(__file__, options, MLX_BFS_MAX_WIDTH=str(width))
    return (found["peak"] - found["gradients"] - found["activations"]) / MEBI


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--family", nargs="+", default=["qwen3_5", "qwen3_5_moe"])
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--eager", action="store_true", help="do not compile the step")
    parser.add_argument("--limit", action="store_true", help="mx.set_memory_limit(1): do not run ahead on a CPU")
    arguments = processes.arguments(parser, worker)
    print(f"{heading()}; T={arguments.tokens}")
    print("MB beyond weights, optimizer, gradients and one activation a layer\n")
    header = " | ".join(f"{depth} layers" for depth in arguments.depths)
    print(f"| family | width | checkpoint | {header} | growth |")
    print("|---" * (len(arguments.depths) + 4) + "|")
    for family in arguments.family:
        for width in arguments.widths:
            for method in arguments.methods:
                peaks = [measure(family, depth, method, width, arguments) for depth in arguments.depths]
                cells = " | ".join(f"{peak:.1f}" for peak in peaks)
                print(f"| {family} | {width} | {method} | {cells} | {max(peaks) - peaks[0]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
