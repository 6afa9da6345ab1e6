"""Prints the demo: four numbered parts, a progress bar, and the answers before and after training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ..train.reports.columns import Record, duration
from ..train.reports.screen import Fact, Screen, to_paste

INDENT = 4
WIDEST = 112


class DemoScreen(Screen):
    """The screen of a demo. It leaves out the trainer's own lines, since the report has their content."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self.console.width = min(self.console.width, WIDEST)
        super().__init__(console=self.console)
        self.losses: list[float] = []
        self.rewards: list[float] = []
        self._began = 0.0

    def title(self, text: str, below: str) -> None:
        """Print the title and the line `below` it."""
        self.console.print()
        self.console.print(Text(f"  {text}", style="bold"))
        self._padded(Text(below, style="dim"), 2)

    def part(self, number: int, heading: str) -> None:
        """Print the heading of a numbered part."""
        self.console.print()
        self.console.print(Text.assemble(" ", (f" {number} ", "reverse cyan"), "  ", (heading, "bold")))

    def line(self, *parts: str | tuple[str, str]) -> None:
        """Print a paragraph, made of texts and of pairs of a text and its style."""
        self._padded(Text.assemble(*parts), INDENT + 1)

    def working(self, text: str) -> AbstractContextManager:
        """A spinner beside `text` for as long as the work takes; a plain line where the output is no terminal."""
        if not self.console.is_terminal:
            self.line((text, "dim"))
            return nullcontext()
        return self.console.status(Text(f"{text} …", style="dim"), spinner="dots", spinner_style="cyan")

    def answers(self, rows: Sequence[tuple[str, str, str, bool]]) -> None:
        """Print rows of message, answer before, answer after, and whether the latter is right."""
        table = Table.grid(padding=(0, 1))
        table.add_column(style="dim", width=6)
        table.add_column(overflow="fold")
        for message, before, after, right in rows:
            table.add_row("", "")
            table.add_row("", Text(message, style="bold"))
            table.add_row("before", Text(before or "(nothing)", style="red"))
            table.add_row("after", Text.assemble((after, "green" if right else "red"), "  ✓" if right else "  ✗"))
        self._padded(table, INDENT + 1)

    def end(self, before: str, after: str, report: str, again: str, seconds: float) -> None:
        """Print the last lines: accuracy before and after, the report's path, and a command to try next."""
        self.console.print()
        self.console.rule(style="dim")
        self.line(
            (before, "bold red"), "  →  ", (after, "bold green"), f"   exactly right, in {seconds:.0f} s all told"
        )
        # A path that is broken into lines cannot be pasted.
        for text in (f"report: {report}", f"next:\n{to_paste(again, self.console.width)}"):
            self.console.print(Text(text), soft_wrap=True)
        self.console.print()

    def say(self, told: str | Fact) -> None:
        """Leave out the trainer's lines."""

    def report(self, record: Record, **_: Any) -> None:
        """Leave out the trainer's records, but keep the mean reward, which the bar shows in the place of the loss."""
        if "reward" in record:
            self.rewards.append(record["reward"])

    def start(self, done: int, total: int) -> None:
        """Show the progress bar where the output is a terminal."""
        self._began = time.perf_counter()
        if not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn(" " * INDENT),
            BarColumn(bar_width=30, complete_style="cyan", finished_style="cyan"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=self.console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, completed=done, note="compiling the step")
        with self.unread():
            self._bar.start()

    def advance(self, done: int, loss: float | None, left: float) -> None:
        """Move the bar to `done` iterations, with the loss and the estimated time that is left beside it."""
        if loss is not None:
            self.losses.append(loss)
        if self._bar is not None:
            total = self._bar.tasks[0].total or done
            left = (time.perf_counter() - self._began) / done * (total - done)
            note = "" if loss is None else f"loss {loss:.4f}  "
            if self.rewards:
                note = f"reward {self.rewards[-1]:.2f}  "
            self._bar.update(self._task, completed=done, note=f"{note}{duration(left)} left")

    def evaluating(self, done: int, total: int) -> None:
        """Show that validation is running, without its progress, since it is quick."""
        if self._bar is not None:
            self._bar.update(self._task, note="validation")

    def _padded(self, what: Text | Table, left: int) -> None:
        self.console.print(Padding(what, (0, 1, 0, left)))
