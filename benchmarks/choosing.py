"""Trains the demo's model with other ranks, learning rates and numbers of lines, and asks it held-out messages.

usage: python benchmarks/choosing.py [--updates 60] [--questions 60] RESULTS.jsonl

Each run makes the same number of updates of 16 lines. One thing at a time differs from the middle: rank 8, learning
rate 5e-3 (cosine to a twenty-fifth of it) and all 4,000 lines. A result is a line of RESULTS.jsonl; runs that are in it
already are not repeated. At the end all are printed as a table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  (before mlx)

# isort: split
from deltatune.demo import flow, task
from deltatune.demo.assets import MODEL
from deltatune.demo.flow import ask
from deltatune.options.config import TrainConfig
from deltatune.train import Trainer
from deltatune.train.reports.screen import Screen
from deltatune.train.setup import Run, ready
from machine import heading

Figures = dict[str, Any]
MIDDLE = {"rank": 8, "rate": 5e-3, "lines": 4000}
RUNS = [
    MIDDLE,
    *(MIDDLE | {"rate": rate} for rate in (1e-3, 2e-2, 2e-4)),
    *(MIDDLE | {"lines": lines} for lines in (60, 240, 960)),
    *(MIDDLE | {"rank": rank} for rank in (1, 32)),
]


def measured_once(results: Path, runs: Iterable[Figures], measure: Callable[[Figures, Path], Figures]) -> list[Figures]:
    """Measure the runs that the JSONL file lacks, add them to it and print them; return all that are in it.

    `measure` returns the figures of a run, which may write into the folder.
    """
    done = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    found = [json.loads(line) for line in done]
    for run in runs:
        if any(run.items() <= each.items() for each in found):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found.append(run | measure(run, Path(folder)))
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found[-1]) + "\n")
        print(json.dumps(found[-1]), flush=True)
    return found


def train_and_ask(config: TrainConfig, items: list[Any]) -> tuple[Run, Figures]:
    """Train, and return the run with its losses and the share of right answers."""
    prepared = ready(config)
    prepared.prepare()
    result = Trainer.of(prepared, Screen(shown=False)).run()
    right = ask(prepared.loaded, items).accuracy
    return prepared, {"train_loss": result.train_loss, "val_loss": result.best_val_loss, "right": right}


def measure(run: Figures, folder: Path) -> Figures:
    """Losses and the share of right answers after a run."""
    items = task.write(folder / "data", test=run["questions"])["test"]
    lines = folder / "data" / "train.jsonl"
    kept = lines.read_text(encoding="utf-8").splitlines(keepends=True)[: run["lines"]]
    lines.write_text("".join(kept), encoding="utf-8")
    rate, updates = run["rate"], run["updates"]
    schedule = {"name": "cosine_decay", "arguments": [rate, updates, rate / 25], "warmup": 10}
    more = {"lora_parameters": {"rank": run["rank"]}, "optimizer_config": {"adamw": {"weight_decay": 0.0}}}
    config = flow.options(MODEL, folder, updates, lr_schedule=schedule, steps_per_eval=updates, **more)
    return train_and_ask(config, items)[1]


def table(results: list[Figures]) -> str:
    """The results as a table of Markdown."""
    rows = ["| rank | learning rate | lines | training loss | validation loss | right |", "|---|---|---|---|---|---|"]
    for each in results:
        losses = f"{each['train_loss']:.3f} | {each['val_loss']:.3f}"
        rows.append(f"| {each['rank']} | {each['rate']:g} | {each['lines']:,} | {losses} | {each['right']:.0%} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    common = {"updates": arguments.updates, "questions": arguments.questions}
    results = measured_once(arguments.results, [run | common for run in RUNS], measure)
    print(f"\n{heading()}\n\n{table(results)}")


if __name__ == "__main__":
    main()
