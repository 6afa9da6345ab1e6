"""Draws the curves of a demo's run, from the metrics that it left.

usage: python benchmarks/plot_demo.py demo-out/metrics.jsonl docs/demo.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LOSSES = {"train_loss": ("training", "#0b6e4f", "-"), "val_loss": ("validation", "#c1440e", "o")}


def draw(metrics: Path, path: Path) -> None:
    """Write the losses of a run, by iteration, as an SVG."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "deltatune"})
    figure, panel = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    for key, (name, colour, style) in LOSSES.items():
        points = [(each["iteration"], each[key]) for each in records if key in each]
        panel.semilogy(*zip(*points, strict=True), style, label=name, color=colour, markersize=5, linewidth=1.6)
    panel.set(xlabel="iteration", ylabel="loss of a token")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
