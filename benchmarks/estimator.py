"""Draws how far the gradient of a policy is off where the loss scores another distribution than the sampled one.

usage: python benchmarks/estimator.py docs/estimator.svg

The policy is that of tests/train/test_estimator.py, a table of logits whose answers of two tokens are
all enumerated: the expected gradient and the exact one are sums, so that no line has any noise.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  (before mlx)

# isort: split
import matplotlib
import numpy as np

from plot import COLOURS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "train"))
from test_estimator import exact_gradient, expected_gradient

TEMPERATURES = np.linspace(0.4, 1.6, 25)
# What is sampled beside the temperature, and what of that the loss scores.
LINES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "scored as it was sampled, as deltatune does": ({}, ("temperature",)),
    "scored at temperature 1": ({}, ()),
    "the 3 likeliest of 5 tokens, scored as sampled": ({"top_k": 3}, ("temperature", "top_k")),
    "the 3 likeliest of 5 tokens, scored at temperature 1 of all": ({"top_k": 3}, ()),
}


def gradients(settings: dict[str, Any], scored: tuple[str, ...]) -> tuple[float, float]:
    """Return the length of the expected gradient over that of the exact one, and the angle between them in degrees."""
    exact = exact_gradient(settings).astype(np.float64).reshape(-1)
    expected = expected_gradient(settings, {name: settings[name] for name in scored}).astype(np.float64).reshape(-1)
    lengths = np.linalg.norm(exact), np.linalg.norm(expected)
    # Of unit vectors, since the cosine of a small angle is 1 in any precision.
    apart = np.linalg.norm(expected / lengths[1] - exact / lengths[0])
    return float(lengths[1] / lengths[0]), float(np.degrees(2 * np.arcsin(apart / 2)))


def draw(path: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "deltatune"})
    figure, panels = plt.subplots(1, 2, figsize=(7.6, 3.4), layout="constrained")
    for number, (name, (sampled, scored)) in enumerate(LINES.items()):
        found = [gradients({"temperature": float(one)} | sampled, scored) for one in TEMPERATURES]
        style = "--" if sampled else "-"
        for panel, values in zip(panels, zip(*found, strict=True), strict=True):
            panel.plot(TEMPERATURES, values, style, label=name, color=COLOURS[number % 2], linewidth=1.6)
            print(f"{name}: {min(values):.3g} to {max(values):.3g}")
    for panel, label in zip(
        panels, ("length, by that of the exact gradient", "degrees off its direction"), strict=True
    ):
        panel.set(xlabel="temperature of sampling", ylabel=label)
        panel.grid(alpha=0.3)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8
    )
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    draw(Path(sys.argv[1]))
