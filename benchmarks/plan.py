"""Compares the forecast of `deltatune plan` with what training allocates at the peak of a step, in buffers and bytes.

usage: python benchmarks/plan.py [--gpu] [--images] [--only NAME ...]

Each configuration has a process of its own. It plans, then trains some iterations with deltatune's trainer while MLX's
allocator is counted (counted_allocator.py, Linux CPUs only), and takes the largest peak of all iterations after the
first, in which MLX traces the step. With --gpu it runs real sizes on a GPU, whose bytes MLX counts itself. With
--images rows hold generated images: one row two, one row one, in three sizes. The column `beyond` has the live buffers
at the peak that are not parameters, gradients or moments. The column `first` has the peak of the first iteration, in
which every Python number of the step occupies a buffer for a while.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
from machine import heading

DEFAULTS: dict[str, Any] = {
    "family": "qwen3_5", "depth": 4, "tokens": 256, "rows": 1, "rank": 8, "checkpoint": False, "accumulate": 1,
    "tune": "lora", "pack": False, "implementation": "", "optimizer": "adamw", "bits": 0, "iterations": 6, "shape": "",
    "waiting": False,
}  # fmt: skip
EXPERTS = {"family": "qwen3_5_moe", "depth": 8}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "experts": EXPERTS,
    "experts, rank 2": EXPERTS | {"rank": 2},
    "experts, rank 64": EXPERTS | {"rank": 64},
    "experts, T=2048": EXPERTS | {"tokens": 2048, "iterations": 3},
    "experts, checkpointed": EXPERTS | {"checkpoint": True},
    "experts, checkpointed, rank 2": EXPERTS | {"checkpoint": True, "rank": 2},
    "experts, checkpointed, rank 64": EXPERTS | {"checkpoint": True, "rank": 64},
    "experts, checkpointed, T=2048": EXPERTS | {"checkpoint": True, "tokens": 2048, "iterations": 3},
    "experts, checkpointed, 32 layers": EXPERTS | {"checkpoint": True, "depth": 32, "iterations": 3},
    "2 rows, accumulated": {"rows": 2, "tokens": 512, "accumulate": 2},
    "full fine-tuning": {"depth": 2, "tune": "full"},
    "packed, checkpointed, adafactor": {"pack": True, "checkpoint": True, "optimizer": "adafactor"},
    "4-bit base, checkpointed": {"bits": 4, "checkpoint": True},
    "gated delta as a loop": {"depth": 2, "tokens": 96, "implementation": "naive"},
}

# Options of vision_step.py's model and of TrainConfig.
IMAGES: dict[str, dict[str, Any]] = {
    "adapters on the language model": {"side": 256},
    "the same, checkpointed": {"side": 256, "grad_checkpoint": True},
    "on tower and projector too, checkpointed": {
        "side": 256, "grad_checkpoint": True, "parts": "language,vision,projector",
    },
    "images of 512 x 512": {"side": 512},
}  # fmt: skip
# Shapes that trainers.py defines.
DENSE = {"shape": "0.8B", "depth": 24, "rows": 2, "tokens": 2048}
MIXTURE = {"shape": "35B-A3B", "depth": 4, "rows": 2, "tokens": 2048}
ON_GPU: dict[str, dict[str, Any]] = {
    "0.8B shape": DENSE,
    "0.8B shape, checkpointed": DENSE | {"checkpoint": True},
    "0.8B shape, 4-bit, checkpointed": DENSE | {"checkpoint": True, "bits": 4},
    "0.8B shape, 4 layers, full fine-tuning": DENSE | {"depth": 4, "tune": "full"},
    "35B-A3B shape, 4 layers": MIXTURE,
    "35B-A3B shape, 4 layers, checkpointed": MIXTURE | {"checkpoint": True},
}


def wait_for_each_operation() -> None:
    """Make MLX and the forecast wait for each operation before the next, so that no count hangs on timing."""
    import mlx.core as mx

    from deltatune.plan import simulate

    # A task is never full and none may run ahead, so that the simulated queue is emptied after every primitive.
    simulate.TASKS_AHEAD = -1
    simulate.PACES["cpu"] = simulate.Pace(10**9, releases=True)
    mx.set_memory_limit(1)


def random_model(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The config.json of a configuration's model, and the model with random weights."""
    import mlx.nn as nn

    from deltatune.models.load import new_model
    from random_data import small_config
    from trainers import SHAPES, mlx_model

    if options["shape"]:
        shape = replace(SHAPES[options["shape"]], layers=options["depth"])
        described, model = shape.config(), mlx_model(shape)
    else:
        described = small_config(options["family"], options["depth"])
        model = new_model(described)
    if options["bits"]:
        nn.quantize(model, 64, options["bits"])
    return described, model


def worker(options: dict[str, Any]) -> dict[str, Any]:
    """Forecast and count one configuration in this process."""
    import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

    # isort: split
    from counted_allocator import ByteCounter, Counter

    if "side" in options:
        return with_images(options)
    options = DEFAULTS | options
    # The arrays that modules make when they are imported are counted as well.
    counter = ByteCounter() if options["shape"] else Counter()

    import mlx.core as mx
    import numpy as np

    from deltatune.data import Splits
    from deltatune.options.config import LoraConfig, TrainConfig
    from deltatune.plan.array_layout import ArrayLayout
    from deltatune.plan.forecast import forecast_step
    from deltatune.plan.traced_step import BatchShape
    from deltatune.train.loop import Trainer
    from deltatune.train.reports.screen import Screen
    from deltatune.train.setup import prepare
    from random_data import UnsavedTokenizer, random_examples

    if options["waiting"]:
        wait_for_each_operation()
    described, model = random_model(options)
    length, iterations = options["tokens"], options["iterations"] * options["accumulate"]
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            lora_parameters=LoraConfig(rank=options["rank"]), optimizer=options["optimizer"],
            grad_checkpoint=options["checkpoint"], batch_size=options["rows"], iters=iterations, pack=options["pack"],
            grad_accumulation_steps=options["accumulate"], max_seq_length=length, adapter_path=folder, val_batches=0,
            fine_tune_type=options["tune"],
            save_every=1000, steps_per_report=1000,
        )  # fmt: skip
        prepare(model, config)
        mx.eval(model.parameters())
        plan = forecast_step(model, config, BatchShape(options["rows"], length), ArrayLayout.measured())
        examples = random_examples(np.random.default_rng(0), [length] * options["rows"] * iterations)
        data, screen = Splits(train=examples), Screen(shown=False)
        trainer = Trainer(model, UnsavedTokenizer(), config, data, model_config=described, screen=screen)
        return train_counted(trainer, counter, plan, options["accumulate"])


def with_images(options: dict[str, Any]) -> dict[str, Any]:
    """Forecast and count a configuration with images, of a random checkpoint."""
    import vision_step
    from counted_allocator import Counter
    from deltatune.options.config import LoraConfig, TrainConfig
    from deltatune.plan import fit
    from deltatune.plan.array_layout import ArrayLayout
    from deltatune.train.loop import Trainer
    from deltatune.train.reports.screen import Screen
    from deltatune.train.setup import ready

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vision_step.write_model(folder, vision_step.shape_of(4, 768, (4, 2, 64), (4, 4, 64), 2048, (3, 192, 768, 3)))
        write_images(folder, options.pop("side"))
        counter = Counter()
        config = TrainConfig(
            model=name, data=name, lora_parameters=LoraConfig(rank=8), batch_size=2, iters=DEFAULTS["iterations"],
            max_seq_length=1024, adapter_path=str(folder / "out"), val_batches=0, min_pixels=1024, save_every=1000,
            steps_per_report=1000, **options,
        )  # fmt: skip
        run = ready(config)
        run.prepare()
        plan = fit.Planner(run, ArrayLayout.measured()).at(*fit.shape(run))
        return train_counted(Trainer.of(run, Screen(shown=False)), counter, plan)


def write_images(folder: Path, side: int) -> None:
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    rows = []
    for row, sizes in enumerate((((side, side), (side // 2, side)), ((side // 2, side // 2),))):
        names = [f"{row}-{number}.png" for number in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name)
        answer = "".join(chr(i) for i in draw.integers(ord("a"), ord("z"), 200))
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": messages, "images": names}))
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")


def train_counted(trainer: Any, counter: Any, plan: Any, skipped: int = 1) -> dict[str, Any]:
    """Train, and return what the plan of a step says beside the peaks of all iterations but the first `skipped`."""
    import mlx.core as mx

    from deltatune.train import loop
    from deltatune.train.iterations import Iterations

    peaks = []

    class Counted(Iterations):
        def _iterate(self) -> bool:
            counter.reset()
            asked = super()._iterate()
            # Training starts an iteration while the one before is computed; here each is counted by itself.
            mx.synchronize()
            peaks.append(counter.now())
            return asked

    loop.Iterations = Counted  # type: ignore[misc]
    trainer.run()
    return {
        "planned": plan.buffers.amount, "counted": max(peak.peak_buffers for peak in peaks[skipped:]),
        "planned_bytes": plan.bytes.amount, "counted_bytes": max(peak.peak_bytes for peak in peaks[skipped:]),
        "known": sum(plan.counts.values()), "tokens": plan.tokens, "first": peaks[0].peak_buffers,
    }  # fmt: skip


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Run worker() in a new process."""
    forced = options.get("implementation")
    return processes.measured(__file__, options, **{"DELTATUNE_GATED_DELTA": forced} if forced else {})


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--gpu", action="store_true", help="bytes of real sizes, on MLX's default device")
    parser.add_argument("--images", action="store_true", help="rows with images")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    arguments = processes.arguments(parser, worker)
    table = IMAGES if arguments.images else CONFIGURATIONS
    table = ON_GPU if arguments.gpu else table
    names = arguments.only or list(table)
    if unknown := [name for name in names if name not in table]:
        parser.error(f"--only {' '.join(unknown)}: expected some of: {'; '.join(table)}.")
    print(f"{heading()}\n")
    if arguments.gpu:
        print("| configuration | tokens | GB counted | planned | off |\n" + "|---" * 5 + "|")
        for name in names:
            found = measure(table[name])
            size, planned = found["counted_bytes"], found["planned_bytes"]
            row = f"{size / 1e9:.2f} | {planned / 1e9:.2f} | {planned / size - 1:+.1%}"
            print(f"| {name} | {found['tokens']} | {row} |", flush=True)
        return
    print("| configuration | tokens | buffers counted | planned | off | beyond | first | MB counted | planned | off |")
    print("|---" * 10 + "|")
    for name in names:
        found = measure(table[name])
        buffers, size = found["counted"], found["counted_bytes"]
        off, off_bytes = found["planned"] / buffers - 1, found["planned_bytes"] / size - 1
        print(
            f"| {name} | {found['tokens']} | {buffers:,} | {found['planned']:,} | {off:+.1%} "
            f"| {buffers - found['known']:,} | {found['first']:,} | {size / 1e6:.1f} "
            f"| {found['planned_bytes'] / 1e6:.1f} | {off_bytes:+.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
