"""Prints a run: a panel, columns and a bar on a terminal; one plain line after another in a pipe or a file."""

from __future__ import annotations

import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from ...machine.wrapping import wrapped
from ..preferences.objectives import line as figures_line
from .log import REWARD, SAMPLES, Record, is_right, tally

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


# The letters of a prompt or an answer that a line in a pipe shows, and those that a terminal shows.
_SHOWN = 100
_SHOWN_WHOLE = 400
# The answers of an iteration that are shown; the report has all of them.
_SAMPLES = 3
# No terminal needs longer lines, which would be hard to read.
WIDEST = 120
_GAUGE = 20
# The facts that people look for first.
_ORDER = ("model", "training", "data", "epochs", "memory")


@dataclass(frozen=True)
class Fact:
    """A line on a run before its first step: its subject, such as `data`, and the text behind that on a terminal."""

    name: str
    text: str
    # The line in a pipe or a file; `Data: ...` by default.
    line: str | None = None
    # For an amount within a limit, its share, which the panel draws.
    share: float | None = None

    def __str__(self) -> str:
        return self.line or f"{self.name.capitalize()}: {self.text}."


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, where rich would end the process."""
        raise BrokenPipeError


class Screen:
    """Prints facts, figures and sentences on rich's console and, on a terminal, a progress bar.

    It is silent unless `shown`, as on ranks other than 0; `verbose` prints details that few people need, such as the
    name of every patch; `plain` lines are as in a pipe, for several ranks: mpirun gives each a terminal of its own.
    """

    def __init__(self, shown: bool = True, console: Console | None = None, verbose: bool = False, plain: bool = False):
        self._shown = shown
        self.verbose = verbose
        self._console = console or _Console(highlight=False, force_terminal=False if plain else None)
        self._facts: list[Fact] = []
        self._columns = Columns(plain=self._console.options.ascii_only)
        # The finite losses of all iterations, and the rewards of all reports.
        self.losses: list[float] = []
        self.rewards: list[float] = []
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def say(self, told: str | Fact) -> None:
        """Print sentences, above the bar if there is one, or a fact. A terminal keeps facts for its panel."""
        if isinstance(told, Fact) and self._console.is_terminal:
            self._facts.append(told)
        else:
            text = str(told)
            style = "yellow" if text.startswith(("Note: ", "Stopping early")) else ""
            self._print(Text(wrapped(text, self._console.width) if self._console.is_terminal else text, style=style))

    def panel(self, title: str) -> None:
        """Print the facts that were said, where they are kept for this."""
        if self._facts:
            places = {name: place for place, name in enumerate(_ORDER)}
            facts = sorted(self._facts, key=lambda fact: places.get(fact.name, len(places)))
            self._print(panel(title, facts, self._width(), self._console.options.ascii_only))
            self._facts = []

    def expect(self, names: Sequence[str]) -> None:
        """Keep columns for figures that training reports and a first evaluation does not."""
        self._columns.expect(names)

    def report(self, record: Record, *, total: int = 0, left: float | None = None, best: bool = False) -> None:
        """Print a record of training, of an evaluation, which may be the best so far, or of answers.

        A record of training stands beside the `total` iterations and the seconds that are estimated to be `left`.
        """
        self.note_reward(record)
        if not self._console.is_terminal:
            self.say(line_of(record, total, left))
        elif SAMPLES in record:
            self._print(_answers(record[SAMPLES]))
        else:
            for row in self._columns.rows(record | {"left": left}, self._width(), best=best):
                self._print(row)

    def note_reward(self, record: Record) -> None:
        """Keep the mean reward of a record that has one, for the bar."""
        if record.get("reward") is not None:
            self.rewards.append(record["reward"])

    def ended(self, line: str, rows: Sequence[tuple[str, str]], command: str) -> None:
        """Print where everything is: `line` in a pipe, and `rows` of names and texts on a terminal; then a command."""
        if not self._console.is_terminal:
            self.say(f"{line}\nNext: {command}")
            return
        for name, text in rows:
            # A path or a command that is broken into lines cannot be pasted.
            self._print(Text.assemble((f"{name:>7} ", "dim"), text))
        self._print(Text.assemble(("Next:\n", "dim"), to_paste(command, self._console.width)))

    def start(self, done: int, total: int) -> None:
        """Show the bar on a terminal or in a notebook that can draw it; `done` of `total` iterations are complete."""
        drawn = self._console.is_terminal or (self._console.is_jupyter and find_spec("ipywidgets") is not None)
        if not (self._shown and drawn) or self._console.is_dumb_terminal:
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,}/{task.total:,}", style="progress.download"),
            TextColumn("{task.fields[note]}"),
        )
        self._bar = Progress(*columns, console=self._console, transient=True, expand=True)
        self._task = self._bar.add_task("training", total=total, completed=done, note="compiling the step")
        with self.unread():
            self._bar.start()

    def advance(self, done: int, loss: float | None, left: float) -> None:
        """Move the bar to `done` iterations; it shows the last reward or loss, its course and the seconds `left`."""
        if loss is not None and math.isfinite(loss):
            self.losses.append(loss)
        if self._bar is None:
            return
        name, values = ("reward", self.rewards) if self.rewards else ("loss", self.losses)
        note = f"{name} {values[-1]:.4f}  " if values else ""
        room = min(16, self._console.width - 64)
        if room >= 8 and not self._console.options.ascii_only:
            note += f"{sparkline(values, room)}  "
        self._bar.update(self._task, completed=done, description="training", note=f"{note}{duration(left)} left")

    def evaluating(self, done: int, total: int) -> None:
        """Show on the bar that `done` of `total` batches are evaluated."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"evaluating {done}/{total}")

    def stop(self) -> None:
        """Remove the bar."""
        bar = self._bar
        self._bar = None
        if bar is not None:
            with self.unread():
                bar.stop()

    def _width(self) -> int:
        return min(self._console.width, WIDEST)

    def _print(self, what: RenderableType) -> None:
        if self._shown:
            with self.unread():
                self._console.print(what, soft_wrap=isinstance(what, Text))

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """Let a run continue silently where nobody reads its output, as after its terminal was closed."""
        try:
            yield
        except OSError:
            self._shown = False


def panel(title: str, facts: Sequence[Fact], width: int, plain: bool = False) -> Panel:
    """Return a panel of facts, no wider than `width`; `plain` where the terminal shows ASCII alone."""
    names = max(len(fact.name) for fact in facts)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=names, style="dim")
    table.add_column(ratio=1)
    for fact in facts:
        text = Text(fitted(fact.text, width - names - 8))
        if fact.share is not None:
            text = Text("\n").join([text, gauge(fact.share, plain)])
        table.add_row(fact.name, text)
    return Panel(table, title=Text(title, style="bold"), title_align="left", border_style="dim", width=width)


def to_paste(command: str, width: int) -> str:
    """Return a shell command in lines of a width where its words are so short; all but the last end with a backslash.

    A line that the terminal breaks would be pasted with a break in it.
    """
    lines = [""]
    for part in re.split(" (?=--)", command):
        if lines[-1] and len(lines[-1]) + len(part) + 3 > width:
            lines.append(f"  {part}")
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n".join(lines)


def gauge(share: float, plain: bool = False) -> Text:
    """Return a bar for a share of a whole, in a colour for its nearness to the whole."""
    filled = min(_GAUGE, max(1, math.ceil(share * _GAUGE)))
    full, empty = ("#", "-") if plain else ("━", "─")
    style = "red"
    if share <= 1:
        style = "green" if share < 0.8 else "yellow"
    return Text.assemble((full * filled, style), (empty * (_GAUGE - filled), "dim"), f" {share:.1%}")


def fitted(text: str, width: int) -> str:
    """Return `text` with words that are longer than a line, such as paths, shown by their ends."""
    words = text.split(" ")
    for place, word in enumerate(words):
        if len(word) > width:
            end = word[3 - width :]
            words[place] = "..." + (end[end.index("/") :] if "/" in end[:-1] else end)
    return " ".join(words)


def line_of(record: Record, total: int, left: float | None) -> str:
    """Format a record as a line, or as several with the beginnings of prompts and answers; arguments as in report()."""
    at = f"Iter {record['iteration']:,}"
    if SAMPLES in record:
        lines = [f"{at}, sample {n}: {_sample(one)}" for n, one in enumerate(record[SAMPLES][:_SAMPLES], 1)]
        summary = _summary(record[SAMPLES])
        return "\n".join([*lines, f"{at}, samples: {summary}."] if summary else lines)
    if left is None:
        figures = figures_line(record, "val_")
        return f"{at}: val loss {record['val_loss']:.4f}{figures}, took {record['val_time']:.1f} s"
    norm = record["grad_norm"]
    return (
        f"{at}/{total:,}: train loss {record['train_loss']:.4f}{figures_line(record)}, "
        f"grad norm {'-' if norm is None else format(norm, '.3g')}, lr {record['learning_rate']:.3g}, "
        f"{three_digits(record['iterations_per_second'])} it/s, {record['tokens_per_second']:,.0f} tok/s, "
        f"peak {gigabytes(record['peak_memory'])}, {duration(left)} left"
    )


def _sample(sample: Record) -> str:
    right = is_right(sample)
    judged = " (right)" if right else ""
    if sample.get(REWARD):
        judged = f" (reward {sample[REWARD]})"
    if right is False:
        judged = f" (expected {_beginning(sample['expected'])})"
    return f"{_beginning(sample['prompt'])} -> {_beginning(sample['answer'])}{judged}"


def _answers(samples: Sequence[Record]) -> Table:
    """Return a table of a few answers, with how many are right."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=8, justify="right", style="dim")
    # Chinese and its kin have no spaces: a sentence is one word, which goes on in the next line.
    table.add_column(overflow="fold")
    for sample in samples[:_SAMPLES]:
        right = is_right(sample)
        style = {True: "green", False: "red", None: ""}[right]
        if sample.get(REWARD):
            table.add_row("reward", Text(sample[REWARD], style="bold"))
        # As a Text, since rich would read markup in a str, such as the [/INST] of a prompt.
        table.add_row("asked", Text(_beginning(sample["prompt"], _SHOWN_WHOLE)))
        if right is False:
            table.add_row("expected", Text(_beginning(sample["expected"], _SHOWN_WHOLE)))
        table.add_row("right" if right else "answer", Text(_beginning(sample["answer"], _SHOWN_WHOLE), style=style))
    if summary := _summary(samples):
        table.add_row("", Text(summary, style="dim"))
    return table


def _summary(samples: Sequence[Record]) -> str:
    """Say of more answers than one how many are right, and how many are in the report alone."""
    more = f"{len(samples) - _SAMPLES:,} more in the report" if len(samples) > _SAMPLES else ""
    return "; ".join(filter(None, (tally(samples) if len(samples) > 1 else "", more)))


def _beginning(text: str, most: int = _SHOWN) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else words[: most - 3] + "..."
