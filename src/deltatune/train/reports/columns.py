"""Lays the figures of a run out in columns that fit the terminal, and draws how the loss goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.text import Text

Record = dict[str, Any]
_BLOCKS = "▁▂▃▄▅▆▇█"
# A report is compared with the mean of so many before it, of which a smaller change is none.
_BEFORE = 5
_CHANGE = 0.005
# After so many rows the headings are printed again.
_ROWS = 30
# The characters of a mark, such as an arrow, and the space before it.
_MARK = 2


def duration(seconds: float) -> str:
    """Format seconds as `1:02:03` or `4:05`."""
    minutes, seconds_left = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as at most `width` block characters; each shows the mean of an equal stretch of the values."""
    count = min(width, len(values))
    cuts = [round(index * len(values) / count) for index in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low = min(means, default=0.0)
    high = max(means, default=0.0)
    return "".join(_BLOCKS[round((mean - low) / ((high - low) or 1.0) * (len(_BLOCKS) - 1))] for mean in means)


@dataclass(frozen=True)
class Column:
    """A column of figures."""

    heading: str
    # Its characters, with two or more of space before the widest figure.
    width: int
    # The key of the value in a record; evaluations have it behind `val_`.
    name: str
    show: Callable[[Any], str]
    # Whether it is there for every run, or only where a record has the value.
    always: bool = True
    # Whether its last characters are kept for a mark.
    marked: bool = False


def three_digits(value: float) -> str:
    """Format a number as `1,234`, `12.3` or `0.0123`: three digits, or as many as stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def gigabytes(amount: float) -> str:
    """Format gigabytes as `12.3 GB` or `45.6 MB`."""
    return f"{three_digits(amount)} GB" if amount >= 0.9995 else f"{three_digits(amount * 1000)} MB"


_DECIMALS = "{:.3f}".format
_SHORT = "{:.3g}".format
# In the order in which they stand.
_COLUMNS = (
    Column("iter", 7, "iteration", "{:,}".format),
    Column("train loss", 13, "train_loss", "{:.4f}".format, marked=True),
    Column("val loss", 11, "val_loss", "{:.4f}".format, marked=True),
    Column("margin", 9, "rewards/margins", _DECIMALS, always=False),
    Column("accuracy", 10, "rewards/accuracies", _DECIMALS, always=False),
    Column("reward", 9, "reward", _DECIMALS, always=False),
    Column("exact", 8, "rewards/exact", _DECIMALS, always=False),
    Column("sampled", 9, "sampled/share", _DECIMALS, always=False),
    Column("length", 9, "completions/mean_length", three_digits, always=False),
    Column("entropy", 10, "entropy", _SHORT, always=False),
    Column("KL", 8, "kl", _DECIMALS, always=False),
    Column("mtp loss", 10, "mtp_loss", _DECIMALS, always=False),
    Column("accepted", 10, "mtp_accepted", _DECIMALS, always=False),
    Column("routers", 9, "aux_loss", _SHORT, always=False),
    Column("grad", 10, "grad_norm", _SHORT),
    Column("lr", 10, "learning_rate", _SHORT),
    Column("it/s", 8, "iterations_per_second", three_digits),
    Column("tok/s", 9, "tokens_per_second", "{:,.0f}".format),
    Column("memory", 10, "peak_memory", gigabytes),
    Column("left", 9, "left", duration),
)
# Where the terminal is narrow, the first of these are kept.
_WANTED = (
    *("iteration", "reward", "rewards/exact", "completions/mean_length"),
    *("train_loss", "val_loss", "rewards/margins", "rewards/accuracies", "mtp_loss", "left", "tokens_per_second"),
    *("learning_rate", "peak_memory", "grad_norm", "entropy", "kl", "mtp_accepted"),
    *("iterations_per_second", "aux_loss"),
)


class Columns:
    """Makes the rows of one run: the headings where they are due, and a row for each report and evaluation.

    A `plain` terminal can show no character beyond ASCII.
    """

    def __init__(self, plain: bool = False):
        self._plain = plain
        self._losses: deque[float] = deque(maxlen=_BEFORE)
        self._seen: set[str] = set()
        self._headed: tuple[Column, ...] = ()
        self._rows = 0

    def expect(self, names: Sequence[str]) -> None:
        """Have columns for these keys of later records from the first heading on."""
        self._seen |= set(names)

    def rows(self, record: Record, width: int, *, best: bool = False) -> list[Text]:
        """Return the lines to print, of at most `width` characters, for a record of metrics.jsonl.

        It has the seconds that are `left` where they are known; `best` marks an evaluation as the best of all.
        """
        self._seen |= {name.removeprefix("val_") for name in record}
        chosen = self._chosen(width)
        row = self._row(record, chosen, best)
        if chosen == self._headed and self._rows < _ROWS:
            self._rows += 1
            return [row]
        self._headed = chosen
        self._rows = 1
        heading = Text(style="dim")
        for column in chosen:
            heading.append(f"{column.heading:>{column.width - _MARK * column.marked}}{' ' * _MARK * column.marked}")
        heading.rstrip()
        return [heading, row]

    def _chosen(self, width: int) -> tuple[Column, ...]:
        fitting: list[str] = []
        by_name = {column.name: column for column in _COLUMNS}
        for name in _WANTED:
            column = by_name[name]
            if (column.always or name in self._seen) and column.width <= width:
                fitting.append(name)
                width -= column.width
        return tuple(column for column in _COLUMNS if column.name in fitting)

    def _row(self, record: Record, chosen: Sequence[Column], best: bool) -> Text:
        evaluated = "val_loss" in record
        row = Text()
        for column in chosen:
            value = record.get(column.name, record.get(f"val_{column.name}") if evaluated else None)
            text = "" if value is None else column.show(value)
            style = ""
            mark = ("", "")
            if column.name == "train_loss":
                mark = self._trend(value)
            elif column.name == "val_loss":
                style = "cyan"
                mark = (self._sign(" *"), "green") if best else mark
            elif column.name not in ("iteration", "tokens_per_second"):
                style = "dim"
            row.append(f"{text:>{column.width - _MARK * column.marked}}", style=style)
            if column.marked:
                row.append(f"{mark[0]:{_MARK}}", style=mark[1])
        row.rstrip()
        return row

    def _trend(self, loss: float | None) -> tuple[str, str]:
        """Return an arrow, and its colour, for a training loss beside those before it."""
        if loss is None:
            return "", ""
        before = sum(self._losses) / len(self._losses) if self._losses else loss
        self._losses.append(loss)
        if loss < before - _CHANGE * abs(before):
            return self._sign(" ↓"), "green"
        return (self._sign(" ↑"), "red") if loss > before + _CHANGE * abs(before) else ("", "")

    def _sign(self, sign: str) -> str:
        return sign if sign.isascii() or not self._plain else ""
