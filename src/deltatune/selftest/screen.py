"""Prints the self-test: a line for each check when it ends, a table of times, and the verdict."""

from __future__ import annotations

import importlib.metadata
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from .outcome import FAILED, NOT_RUN, PASSED, Check, Outcome
from .record import SelftestRecord
from .times import Timing

_MARKS = {PASSED: ("✓", "green"), FAILED: ("✗", "bold red"), NOT_RUN: ("–", "dim")}


class SelftestScreen:
    """Prints to `console`, and shows the running check where that is a terminal."""

    def __init__(self, console: Console):
        self.console = console

    def start(self, facts: dict[str, str], versions: dict[str, str], path: str) -> None:
        """Print the first lines: facts about this machine, and the path of the file."""
        for name, value in (facts | {"versions": ", ".join(f"{n} {v}" for n, v in versions.items())}).items():
            self.console.print(Text(f"{name:>10}  ", style="dim").append(value, style="not dim"))
        self.console.print(Text(f"{'record':>10}  ", style="dim").append(path, style="not dim"))

    def section(self, title: str) -> None:
        """Print a section's title."""
        self.console.print(Text(f"\n{title}", style="bold"))

    def working(self, check: Check) -> AbstractContextManager:
        """A spinner beside the check's name; nothing where the output is no terminal, or where the check prints."""
        if not self.console.is_terminal or check.name == "demo":
            return nullcontext()
        return self.console.status(Text(f"{check.name} …", style="dim"))

    def outcome(self, check: Check, outcome: Outcome, seconds: float) -> None:
        """Print the line of a check."""
        sign, style = _MARKS[outcome.status]
        text = Text.assemble((f"{sign} ", style), check.name)
        text.append(f"  {outcome.detail}", style="red" if outcome.status == FAILED else "dim")
        self.console.print(text.append(f"  {seconds:.1f} s", style="dim"))

    def times(self, timings: list[Timing]) -> None:
        """Print the table of times and memory."""
        table = Table(box=None, padding=(0, 3, 0, 0))
        for column in ("size", "implementation", "ms a call", "peak MB"):
            right = column in ("ms a call", "peak MB")
            table.add_column(column, justify="right" if right else "left", no_wrap=column == "size")
        for size, group in groupby(sorted(timings, key=lambda timing: timing.tokens), key=lambda timing: timing.size):
            for timing in group:
                figures: tuple[str | Text, str] = (Text(timing.skipped or "", style="dim"), "")
                if timing.milliseconds is not None and timing.peak_bytes is not None:
                    figures = f"{timing.milliseconds:,.1f}", f"{timing.peak_bytes / 1e6:,.0f}"
                table.add_row(size, timing.implementation, *figures)
        self.console.print(table)

    def end(self, record: SelftestRecord) -> None:
        """Print the times of a GPU's implementations, the verdict, the path of the file, and docs/hardware.md's row."""
        for times in record.content["doctor"]["times"]:
            ms = ", ".join(f"{name} {ms:.1f} ms" for name, ms in times["milliseconds"].items())
            self.console.print(Text(f"{times['calls']}: {ms}", style="dim"))
        passed, failed, skipped = (record.count(status) for status in (PASSED, FAILED, NOT_RUN))
        style = "green" if record.passed else "red"
        words = f"{passed} checks passed, {failed} failed, {skipped} are not for this machine or not installed."
        verdict = "Training is right here." if record.passed else "Something here is wrong: see ✗ above."
        self.console.print(Group(Rule(style=style), Text(f"{verdict} {words}", style=f"bold {style}")))
        self.console.print(Text(f"All of it is in {record.path}, {destination()}.", style="dim"))
        self.console.print(Text("The line for docs/hardware.md:", style="dim"))
        self.console.print(record.content["line"], soft_wrap=True, markup=False, highlight=False)


def destination() -> str:
    """Return where the file may be sent: the address of issues in the package's metadata, if the release wrote one."""
    try:
        addresses = importlib.metadata.metadata("deltatune").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        addresses = []
    for name, _, address in (entry.partition(", ") for entry in addresses):
        if name == "Issues":
            return f"for {address}: please attach it to a report there"
    return "for the project's issue page: please attach it to a report there"
