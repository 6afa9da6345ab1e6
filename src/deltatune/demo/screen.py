"""Prints the demo: four numbered parts, a progress bar, and the answers before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..train.reports.screen import Fact, Record, Screen, to_paste

INDENT = 4
WIDEST = 112


class DemoScreen(Screen):
    """The screen of a demo. It leaves out the trainer's own lines, since the report has their content."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self.console.width = min(self.console.width, WIDEST)
        super().__init__(console=self.console)

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
        """Leave out the trainer's records, but note the mean reward."""
        self.note_reward(record)

    def _padded(self, what: Text | Table, left: int) -> None:
        self.console.print(Padding(what, (0, 1, 0, left)))
