"""Compares the forecast of `deltatune plan` for steps with images with what training allocates.

usage: DELTATUNE_THREADS=1 python benchmarks/plan_images.py [--only NAME ...]

It works as benchmarks/plan.py does, on a random checkpoint and generated images: one row with two images and one row
with one, in three sizes. Each configuration has a process of its own.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import processes
import vision_step
from machine import heading
from plan import print_table, train_counted

SHAPE = vision_step.shape_of(4, 768, (4, 2, 64), (4, 4, 64), 2048, (3, 192, 768, 3))
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "adapters on the language model": {},
    "the same, checkpointed": {"grad_checkpoint": True},
    "on tower and projector too, checkpointed": {"grad_checkpoint": True, "parts": "language,vision,projector"},
    "images of 512 x 512": {"side": 512},
}
ITERATIONS = 6


def write_data(folder: Path, side: int) -> None:
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


def worker(options: dict[str, Any]) -> dict[str, Any]:
    """Forecast and count one configuration in this process."""
    import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

    # isort: split
    from counted_allocator import Counter
    from deltatune.options.config import LoraConfig, TrainConfig
    from deltatune.plan import fit
    from deltatune.plan.array_layout import ArrayLayout
    from deltatune.train.loop import Trainer
    from deltatune.train.reports.screen import Screen
    from deltatune.train.setup import ready

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vision_step.write_model(folder, SHAPE)
        write_data(folder, options.pop("side", 256))
        counter = Counter()
        config = TrainConfig(
            model=name, data=name, lora_parameters=LoraConfig(rank=8), batch_size=2,
            iters=ITERATIONS, max_seq_length=1024, adapter_path=str(folder / "out"), val_batches=0, min_pixels=1024,
            save_every=1000, steps_per_report=1000, **options,
        )  # fmt: skip
        run = ready(config)
        run.prepare()
        rows, length = fit.shape(run)
        plan = fit.Planner(run, ArrayLayout.measured()).at(rows, length)
        return train_counted(Trainer.of(run, Screen(shown=False)), counter, plan)


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    arguments = processes.arguments(parser, worker)
    print(f"{heading()}\n")
    print_table({name: partial(processes.measured, __file__, CONFIGURATIONS[name]) for name in arguments.only})


if __name__ == "__main__":
    main()
