"""Draws the curves of a run as inline SVG for the report, whose style sheet sets the colours (light or dark)."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# The widths of a drawing in pixels: beside another, over the whole page, and on a phone, where text must not shrink.
WIDTH, WIDE, NARROW, HEIGHT = 460, 960, 330, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 12, 30

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """One curve of a plot.

    Attributes:
        name: Its name in the legend; empty for none.
        points: Its points, as (x, y).
        mark: The page's colour for it, `a` or `b`.
        dots: Whether every point gets a dot.
    """

    name: str
    points: Points
    mark: str = "a"
    dots: bool = False


_SMALL = {
    "Gradient norm, before clipping": "grad_norm",
    "Learning rate": "learning_rate",
    "Tokens per second": "tokens_per_second",
    "Peak memory, GB": "peak_memory",
    "Load-balancing loss of the routers": "aux_loss",
    "z-loss of the routers": "z_loss",
}


_PREFERENCES = {
    "Margin of the chosen answer's reward": "rewards/margins",
    "Share of pairs whose chosen answer has the larger reward": "rewards/accuracies",
}


def draw(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return every plot for which the records of a metrics.jsonl hold values.

    Returns:
        The title of each plot, and its SVG for wide and for narrow screens, of which the page's style shows one.
    """
    loss = [
        Curve("training", _series(metrics, "train_loss")),
        Curve("validation", _series(metrics, "val_loss"), "b", dots=True),
    ]
    drawn = []
    rewards = [
        Curve(side, _series(metrics, f"rewards/{side}"), mark) for side, mark in (("chosen", "a"), ("rejected", "b"))
    ]
    pairs = [line for line in rewards if line.points]
    if shown := [line for line in loss if line.points]:
        drawn.append((f"Loss per {'preference' if pairs else 'token'}", [plot(shown, width=w) for w in (WIDE, NARROW)]))
    if pairs:
        drawn.append(("Rewards", [plot(pairs, width=width) for width in (WIDTH, NARROW)]))
    for title, name in _PREFERENCES.items():
        both = (
            Curve("training", _series(metrics, name)),
            Curve("validation", _series(metrics, f"val_{name}"), "b", True),
        )
        if shown := [line for line in both if line.points]:
            drawn.append((title, [plot(shown, width=width) for width in (WIDTH, NARROW)]))
    for title, name in _SMALL.items():
        if points := _series(metrics, name):
            drawn.append((title, [plot([Curve("", points)], width=width, from_zero=True) for width in (WIDTH, NARROW)]))
    return drawn


def _series(metrics: Sequence[dict[str, Any]], name: str) -> Points:
    return [(record["iteration"], record[name]) for record in metrics if record.get(name) is not None]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` evenly spaced round numbers in [low, high]."""
    step = _round_step((high - low) / count)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(factor for factor in (1, 2, 2.5, 5, 10) if step <= factor * power * (1 + 1e-9))


def plot(lines: Sequence[Curve], *, width: int = WIDTH, from_zero: bool = False) -> str:
    """Return an SVG of one set of axes with all curves on it.

    Args:
        lines: The curves; their points must be finite. The x axis starts at 0 or below.
        width: The width of the drawing, in pixels.
        from_zero: Whether the y axis starts at 0 or below, too.
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    left, right = _range(min(0.0, *xs), max(xs), 0.0)
    low, high = _range(min(ys + [0.0] * from_zero), max(ys), 0.06)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - left) / (right - left) * (width - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [_axes(left, right, low, high, place)]
    for line in lines:
        at = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline class="line {line.mark}" points="{path}"/>')
        if line.dots or len(at) == 1:
            parts += [f'<circle class="dot {line.mark}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in at]
    parts.append(_legend([line for line in lines if line.name], width))
    label = ", ".join(line.name for line in lines if line.name) or "curve"
    head = f'class={"narrow" if width == NARROW else "broad"} viewBox="0 0 {width} {HEIGHT}" role="img"'
    return f'<svg {head} aria-label="{html.escape(label)}">{"".join(parts)}</svg>'


def _range(low: float, high: float, margin: float) -> tuple[float, float]:
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        pad = abs(high) * 0.1 or 1.0
        return low - pad, high + pad
    room = (high - low) * margin
    # If no value is negative, the margin must not make the axis negative.
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _axes(left: float, right: float, low: float, high: float, place: Any) -> str:
    parts = []
    for y in ticks(low, high):
        (start, down), (end, _) = place(left, y), place(right, y)
        parts.append(f'<line class="grid" x1="{start:.1f}" x2="{end:.1f}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{down + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    for x in ticks(left, right):
        across, _ = place(x, low)
        if abs(x - round(x)) < 1e-9:
            parts.append(f'<text x="{across:.1f}" y="{HEIGHT - 9}" text-anchor="middle">{round(x):,}</text>')
    parts.append(f'<text x="{LEFT - 7}" y="{HEIGHT - 9}" text-anchor="end">iteration</text>')
    return "".join(parts)


def _number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.6g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2g}"


def _legend(lines: Sequence[Curve], width: int) -> str:
    parts = []
    across = width - RIGHT - 6
    for line in reversed(lines):
        across -= 7 * len(line.name)
        parts.append(f'<text x="{across}" y="{TOP + 10}">{html.escape(line.name)}</text>')
        across -= 22
        parts.append(f'<line class="line {line.mark}" x1="{across}" x2="{across + 16}" y1="{TOP + 6}" y2="{TOP + 6}"/>')
        across -= 14
    return "".join(parts)
