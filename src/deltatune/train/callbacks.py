"""The functions that a caller has a run call, and the exception with which one of them ends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class StopTraining(Exception):  # noqa: N818 (a request, and no error)
    """A callback raises it to end the run in order: everything is saved, and the results are returned."""


class Callbacks(NamedTuple):
    """The functions that a run calls, on every rank; values are the same on all ranks but for times.

    Attributes:
        on_report: Takes the record of a training report, as metrics.jsonl has it.
        on_evaluation: Takes the record of an evaluation.
        on_save: Takes the output folder after a save.
    """

    on_report: Callable[[dict[str, Any]], object] | None = None
    on_evaluation: Callable[[dict[str, Any]], object] | None = None
    on_save: Callable[[Path], object] | None = None
