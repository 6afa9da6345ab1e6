"""Chooses the curves of a run's report from its metrics; report.js draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Curve:
    """One curve of a plot.

    Attributes:
        key: The name of its values in a record of metrics.jsonl.
        name: Its name in the legend; empty for none.
        mark: The page's colour for it, `a` or `b`.
        dots: Whether every point gets a dot.
    """

    key: str
    name: str = ""
    mark: str = "a"
    dots: bool = False


@dataclass(frozen=True)
class Plot:
    """One set of axes.

    Attributes:
        title: Its heading.
        curves: The curves that it shows where a run has values for them.
        zero: Whether the y axis starts at 0 or below, so that it is linear until the reader chooses otherwise.
    """

    title: str
    curves: Sequence[Curve]
    zero: bool = False


def _both(key: str, validation: str) -> list[Curve]:
    return [Curve(key, "training"), Curve(validation, "validation", "b", dots=True)]


_REWARDS = ("rewards/chosen", "rewards/rejected")
_PLOTS = (
    Plot("Rewards", [Curve(_REWARDS[0], "chosen"), Curve(_REWARDS[1], "rejected", "b")]),
    Plot("Margin of the chosen answer's reward", _both("rewards/margins", "val_rewards/margins")),
    Plot(
        "Share of pairs whose chosen answer has the larger reward",
        _both("rewards/accuracies", "val_rewards/accuracies"),
    ),
    Plot("Gradient norm, before clipping", [Curve("grad_norm")]),
    Plot("Learning rate", [Curve("learning_rate")], zero=True),
    Plot("Tokens per second", [Curve("tokens_per_second")], zero=True),
    Plot("Peak memory, GB", [Curve("peak_memory")], zero=True),
    Plot("Load-balancing loss of the routers", [Curve("aux_loss")]),
    Plot("z-loss of the routers", [Curve("z_loss")]),
)


def plots(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the plots for which the records of a metrics.jsonl hold values, as report.js takes them.

    Returns:
        For each plot its `title`, `zero` and `curves`; for each of these `name`, `mark`, `dots` and `points`, which are
        pairs of an iteration and a value.
    """
    of_pairs = any(record.get(key) is not None for record in metrics for key in _REWARDS)
    loss = Plot(f"Loss per {'preference' if of_pairs else 'token'}", _both("train_loss", "val_loss"))
    drawn = []
    for plot in (loss, *_PLOTS):
        curves = [
            {"name": curve.name, "mark": curve.mark, "dots": curve.dots, "points": points}
            for curve in plot.curves
            if (points := _points(metrics, curve.key))
        ]
        if curves:
            drawn.append({"title": plot.title, "zero": plot.zero, "curves": curves})
    return drawn


def _points(metrics: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    # Six digits are more than a drawing shows.
    return [(record["iteration"], float(f"{record[key]:.6g}")) for record in metrics if record.get(key) is not None]
