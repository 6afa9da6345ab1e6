"""Checks that live buffers and memory do not grow over a long run with adapters on experts.

usage: python benchmarks/long_run.py [--ranks 2 4 8] [--steps 1000]

The run is a small version of one that users report to fail: a qwen3_5_moe with 128 experts, adapters on the experts of
three layers, and lengths that vary from step to step, trained with deltatune's Trainer, validations and saves included.
Each LoRA rank has a process of its own, in which MLX's allocator is counted (counted_allocator.py, Linux CPUs only).
What is alive after a step is compared exactly. A step's peak depends on its padded width, and is compared with peaks of
the same width.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import processes
from machine import heading

EARLY = 10
DEFAULTS: dict[str, Any] = {
    "rank": 4, "steps": 1000, "layers": [1, 3, 5], "depth": 6, "experts": 128, "routed": 8, "hidden": 64, "inner": 32,
    "shortest": 16, "longest": 128, "examples": 400,
}  # fmt: skip


def model_config(options: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a small qwen3_5_moe, in which every second layer is attention."""
    from random_data import small_config

    made = small_config("qwen3_5_moe", options["depth"])
    made["text_config"] |= {
        "hidden_size": options["hidden"], "moe_intermediate_size": options["inner"],
        "shared_expert_intermediate_size": options["inner"], "num_experts": options["experts"],
        "num_experts_per_tok": options["routed"], "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    }  # fmt: skip
    return made


def resident() -> int:
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def worker(options: dict[str, Any]) -> dict[str, Any]:
    """Train in this process; returns each step's width, its peak, and what is alive after it."""
    import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

    # isort: split
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten

    from counted_allocator import Counter
    from deltatune.data import Splits
    from deltatune.data.example import Example
    from deltatune.models.load import new_model
    from deltatune.options.config import LoraConfig, TrainConfig
    from deltatune.train import iterations, loop
    from deltatune.train.reports.screen import Screen
    from deltatune.train.setup import prepare
    from random_data import UnsavedTokenizer, random_examples

    options = DEFAULTS | options
    counter = Counter()
    model = new_model(described := model_config(options))
    random = np.random.default_rng(0)

    def examples(count: int) -> list[Example]:
        return random_examples(random, random.integers(options["shortest"], options["longest"] + 1, count))

    steps: list[dict[str, int]] = []

    class Counted(iterations.Iterations):
        def _iterate(self) -> bool:
            counter.reset()
            asked = super()._iterate()
            now = counter.now()
            steps.append({
                "width": width[0], "buffers": now.buffers, "bytes": now.bytes, "peak_buffers": now.peak_buffers,
                "peak_bytes": now.peak_bytes, "resident": resident(),
            })  # fmt: skip
            return asked

        def _next_batch(self) -> Any:
            batch = super()._next_batch()
            width[0] = batch.inputs.shape[1]
            return batch

    width, loop.Iterations = [0], Counted  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            lora_parameters=LoraConfig(rank=options["rank"], keys=["*.switch_mlp.*"], layers=options["layers"]),
            batch_size=1, iters=options["steps"], max_seq_length=options["longest"], adapter_path=folder,
            learning_rate=1e-4, val_batches=8, steps_per_eval=250, save_every=250, steps_per_report=50,
        )  # fmt: skip
        prepare(model, config)
        mx.eval(model.parameters())
        data = Splits(train=examples(options["examples"]), valid=examples(8))
        screen = Screen(shown=False)
        loop.Trainer(model, UnsavedTokenizer(), config, data, model_config=described, screen=screen).run()
    adapters = sum(array.nbytes for _, array in tree_flatten(model.trainable_parameters()))
    return {"steps": steps, "adapters": adapters}


def row(rank: int, found: dict[str, Any]) -> str:
    """A line of the table; its peaks are the largest of a tenth of the steps from EARLY on, and of the last tenth."""
    steps = found["steps"]
    early, last, part = steps[EARLY - 1], steps[-1], len(steps) // 10
    first, final = steps[EARLY - 1 : EARLY - 1 + part], steps[-part:]

    def most(name: str) -> tuple[int, int]:
        return max(step[name] for step in first), max(step[name] for step in final)

    def mega(*sizes: int) -> str:
        return " | ".join(f"{size / 1e6:.2f}" for size in sizes)

    buffers, sizes = most("peak_buffers"), most("peak_bytes")
    return (
        f"| {rank} | {mega(found['adapters'])} | {early['buffers']} | {last['buffers']} "
        f"| {mega(early['bytes'], last['bytes'])} | {buffers[0]:,} | {buffers[1]:,} | {mega(*sizes)} "
        f"| {early['resident'] / 1e6:.0f} | {last['resident'] / 1e6:.0f} |"
    )


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=DEFAULTS["steps"])
    arguments = processes.arguments(parser, worker)
    print(f"{heading()}\n")
    last, part = arguments.steps, arguments.steps // 10
    heads = ["rank", "MB of adapters", f"buffers after step {EARLY}", f"after {last:,}", f"MB after {EARLY}"]
    heads += [f"after {last:,}", f"peak buffers, {part} steps from {EARLY}", f"last {part}", f"peak MB from {EARLY}"]
    heads += [f"last {part}", f"resident MB after {EARLY}", f"after {last:,}"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for rank in arguments.ranks:
        found = processes.measured(__file__, {"rank": rank, "steps": arguments.steps})
        print(row(rank, found), flush=True)
        widths = [{step["width"] for step in part} for part in (found["steps"][: EARLY - 1], found["steps"])]
        if widths[0] != widths[1]:
            print(f"(widths {sorted(widths[1] - widths[0])} came first after step {EARLY}: the rows do not compare)")


if __name__ == "__main__":
    main()
