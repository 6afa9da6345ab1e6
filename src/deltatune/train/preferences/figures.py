"""Turns the sums of a preference loss into the figures that people watch, under TRL's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .objectives import MARGINS


def means(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Return the means by name, with the margin of the chosen over the rejected answers' rewards.

    Args:
        names: Objective.figures.
        sums: As many sums, then how many answers each is the sum of. A figure of no answer is left out.
    """
    counts = sums[len(names) :]
    by_name = {name: value / count for name, value, count in zip(names, sums, counts, strict=False) if count}
    if "rewards/chosen" in by_name and "rewards/rejected" in by_name:
        by_name[MARGINS] = by_name["rewards/chosen"] - by_name["rewards/rejected"]
    return by_name


def line(record: Mapping[str, float], prefix: str = "") -> str:
    """Return the part of a line of progress on the figures in `record`, or an empty text if it has none."""
    shown = {"margin": f"{prefix}{MARGINS}", "accuracy": f"{prefix}rewards/accuracies", "kl": f"{prefix}kl"}
    return "".join(f", {word} {record[name]:.3f}" for word, name in shown.items() if name in record)
