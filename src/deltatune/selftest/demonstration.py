"""Runs the whole demo as one check of the self-test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

from ..demo import run_demo
from ..demo.screen import DemoScreen
from .outcome import FAILED, PASSED, Check, Outcome


class _RecordingScreen(DemoScreen):
    """The demo's screen, which also records the accuracy before and after training."""

    before = after = "not reached"

    def end(self, before: str, after: str, report: str, again: str, seconds: float) -> None:
        self.before, self.after = before, after


def demonstrated(console: Console, **shortened: int) -> Outcome:
    """Run the demo in a temporary folder.

    shortened: options of run_demo that make it shorter.
    """
    with tempfile.TemporaryDirectory() as folder:
        screen = _RecordingScreen(console)
        code = run_demo(Path(folder) / "demo", screen=screen, **shortened)
    facts = {"right_before": screen.before, "right_after": screen.after}
    words = f"{screen.before} right before, {screen.after} after"
    if code:
        words += "; expected 90 % after, and the same answers from mlx-lm alone"
    return Outcome(FAILED if code else PASSED, words, facts=facts)


def checks(quick: bool, console: Console) -> Iterator[Check]:
    """The demo, which takes two minutes; `quick` leaves it out."""
    if not quick:
        yield Check("demo", partial(demonstrated, console))
