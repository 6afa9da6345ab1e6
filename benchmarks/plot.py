"""Draws the cost of the gated delta rule by the length of the sequence, from files of results.

usage: python benchmarks/plot.py RESULTS.json [...] docs/gated_delta.svg

Time and memory are those of 1,000 tokens, so that a level line means a cost in proportion to the length.
"""

from __future__ import annotations

import json
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from tables import joined

COLOURS = ["#0b6e4f", "#c1440e", "#3a5a98", "#8a6d1d", "#7a3e9d", "#555555", "#b02a5b", "#2a9d9d", "#a0a000"]
LENGTH = "tokens in the sequence, T"
WHAT = {"ms": "calls in a row", "MB": "over inputs and gradients"}
# A scale is linear and begins at 0 where its largest value is less than this many times its smallest.
LINEAR = 8


def curves(result: dict[str, Any]) -> dict[str, list[tuple[int, float, float]]]:
    """(T, ms, MB) by implementation, ms and MB for 1,000 tokens; of single calls where none were made in a row.

    Raises:
        SystemExit: If nothing was measured at the sizes of the plot.
    """
    names = {size["name"] for size in result["sweep"]}
    found: dict[str, list[tuple[int, float, float]]] = {}
    for record in result["records"]:
        if record["size"]["name"] in names and "as_called" in record:
            label = record["implementation"] + (" (a time only)" if record["times_only"] else "")
            seconds = record.get("in_a_row", record["as_called"])
            length = record["size"]["tokens"]
            tokens = record["size"]["batch"] * length
            found.setdefault(label, []).append((length, seconds * 1e6 / tokens, record["excess"] / 1e3 / tokens))
    if not found:
        raise SystemExit("No times by length in these files: run gated_delta.py with --lengths.")
    return {label: sorted(points) for label, points in found.items()}


def draw(result: dict[str, Any], path: Path) -> None:
    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "deltatune"})
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    size = result["sweep"][0]
    lines = curves(result)
    for panel, which, label in ((panels[0], 1, "ms"), (panels[1], 2, "MB")):
        values = []
        for (name, points), colour in zip(lines.items(), cycle(COLOURS), strict=False):
            x, y = [point[0] for point in points], [max(point[which], 1e-3) for point in points]
            panel.plot(x, y, "o-", label=name, color=colour, markersize=3, linewidth=1.4)
            values += y
        far = max(values) > LINEAR * min(values)
        axes(panel, f"{label} per 1,000 tokens\n{WHAT[label]}", LENGTH, logarithmic=far)
        if not far:
            panel.set_ylim(bottom=0)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    where = result["machine"]["gpu"] or result["machine"]["cpu"]
    heads = f"B{size['batch']}, {size['key_heads']}/{size['value_heads']} heads of {size['head_size']}, {size['dtype']}"
    figure.suptitle(f"Gated delta rule, forward and backward: {heads}. {where}, {result['date']}", fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    plt.close(figure)


def axes(panel: Axes, label: str, along: str = "tokens", logarithmic: bool = True) -> None:
    """Style a panel: x doubles from tick to tick, and y has the given label, with a logarithmic scale or without."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log" if logarithmic else "linear")
    panel.xaxis.set_major_formatter(lambda x, _: f"{int(x):,}")
    panel.set_xlabel(along)
    panel.set_ylabel(label)
    panel.grid(color="#dddddd", linewidth=0.5)
    panel.tick_params(axis="x", labelrotation=45)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    *files, picture = map(Path, sys.argv[1:])
    draw(joined([json.loads(path.read_text()) for path in files]), picture)
