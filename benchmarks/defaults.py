"""Trains the demo's model with mlx_lm.lora's defaults and with deltatune's, and draws losses of runs.

usage: python benchmarks/defaults.py FIGURE.svg [METRICS.jsonl]

Both runs are `deltatune train` on the demo's 4,000 lines, 1,000 iterations of 4 lines, and differ in the options of OLD
alone. Then each model is asked held-out messages. With metrics of a run, only that run is drawn, as docs/demo.svg is.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import deltatune  # before mlx

# isort: split
from deltatune.demo import task
from deltatune.demo.assets import MODEL
from deltatune.demo.flow import ask
from deltatune.options.config import TrainConfig
from machine import heading
from plot import COLOURS

OLD: dict[str, Any] = {
    "learning_rate": 1e-5,
    "lr_schedule": "constant",
    "warmup": 0.0,
    "optimizer": "adam",
    "optimizer_config": {"adam": {"bias_correction": False}},
    "num_layers": 16,
    "lora_parameters": {"rank": 8, "scale": 20.0},
}
RUNS: dict[str, dict[str, Any]] = {"mlx_lm.lora's defaults": OLD, "deltatune's defaults": {}}
Records = list[dict[str, Any]]


def records(metrics: Path) -> Records:
    """The records of a metrics.jsonl."""
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def measured(name: str, folder: Path) -> Records:
    """Train with the options of a run, print how many answers are right, and return its records."""
    items = task.write(folder / "data")["test"]
    config = TrainConfig(
        model=str(MODEL), data=str(folder / "data"), adapter_path=str(folder / "out"), val_batches=-1, **RUNS[name]
    )
    loaded, result = deltatune.finetune(config)
    print(f"{name}: training loss {result.train_loss:.4f}, validation loss {result.val_loss:.4f}; right: ", end="")
    print(ask(loaded, items))
    return records(folder / "out" / "metrics.jsonl")


def draw(runs: dict[str, Records], path: Path) -> None:
    """Draw training losses as lines and validation losses as points, by iteration."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "deltatune"})
    figure, panel = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    for (name, of_run), colour in zip(runs.items(), COLOURS, strict=False):
        for key, kind, style in (("train_loss", "training", "-"), ("val_loss", "validation", "o")):
            points = [(record["iteration"], record[key]) for record in of_run if key in record]
            label = f"{name}, {kind}" if len(runs) > 1 else kind
            panel.semilogy(*zip(*points, strict=True), style, label=label, color=colour, markersize=5, linewidth=1.6)
    panel.set(xlabel="iteration", ylabel="loss of a token")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Draw the metrics that the command line names, or those of both runs."""
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    if len(sys.argv) == 3:
        runs = {"": records(Path(sys.argv[2]))}
    else:
        runs = {}
        for name in RUNS:
            with tempfile.TemporaryDirectory() as folder:
                runs[name] = measured(name, Path(folder))
        print(heading())
    draw(runs, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
