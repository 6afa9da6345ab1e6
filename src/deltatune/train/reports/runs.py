"""Finds the runs below folders by their files, and lays several of them in one report."""

from __future__ import annotations

import datetime
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError
from ...machine.atomic_files import write
from ...options.config import TrainConfig
from .log import Record
from .report import ReportTable, read_metrics, render

COLUMNS = ("folder", "date", "model", "data", "rate", "iterations", "best loss")
# A report holds the options of its run in this element (report.html).
_OPTIONS = re.compile(r"<pre id=options>(.*?)</pre>", re.DOTALL)
_METRICS = ("metrics.jsonl", "*/metrics.jsonl", "*/*/metrics.jsonl")
# The options on which the learning rate depends.
_OF_RATE = ("learning_rate", "fine_tune_type", "from_scratch", "loss")


@dataclass(frozen=True)
class PastRun:
    """A run, as its files show it: options that differ from their defaults are none where its report is missing."""

    folder: Path
    records: Sequence[Record]
    options: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> PastRun:
        """Read the files of the run in a folder."""
        report = folder / "report.html"
        written = _OPTIONS.search(report.read_text(encoding="utf-8", errors="replace")) if report.is_file() else None
        options = yaml.safe_load(html.unescape(written[1])) if written else {}
        return cls(folder, read_metrics(folder / "metrics.jsonl")[0], options)

    def row(self) -> tuple[Any, ...]:
        """Return the cells of COLUMNS: the loss is the lowest one of validation, or the last one of training."""
        training = self._losses("train_loss")
        best = min(self._losses("val_loss"), default=training[-1] if training else None)
        date = datetime.datetime.fromtimestamp((self.folder / "metrics.jsonl").stat().st_mtime)
        done = max((record["iteration"] for record in self.records), default=0)
        data = self.options.get("data") or self.options.get("hf_dataset")
        named = {name: self.options[name] for name in _OF_RATE if name in self.options}
        rate = TrainConfig(**named).learning_rate if self.options else None
        return self.folder, f"{date:%Y-%m-%d %H:%M}", self.options.get("model"), data, rate, done, best

    def _losses(self, name: str) -> list[float]:
        return [record[name] for record in self.records if record.get(name) is not None]


def find(folders: Sequence[str]) -> list[PastRun]:
    """Return the runs in folders and two floors below them, the oldest first; a folder without any is a UserError."""
    parents: dict[Path, None] = {}
    for folder in folders:
        files = [file for pattern in _METRICS for file in Path(folder).glob(pattern)]
        if not files:
            raise UserError(
                f"{folder}: no run is there: expected a folder with metrics.jsonl, as --adapter-path has it."
            )
        parents |= dict.fromkeys(file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime))
    return [PastRun.read(folder) for folder in parents]


def write_comparison(path: Path, runs: Sequence[PastRun]) -> None:
    """Write a report with the curves of several runs, and the options in which they differ."""
    last = [run.folder.name for run in runs]
    names = [name if last.count(name) == 1 else str(run.folder) for name, run in zip(last, runs, strict=True)]
    options = {name: None for run in runs for name in run.options}
    values = {name: [str(run.options.get(name, "–")) for run in runs] for name in options}
    rows = [(name, *cells) for name, cells in values.items() if len(set(cells)) > 1]
    page = render(
        f"{len(runs):,} runs",
        {name: run.records for name, run in zip(names, runs, strict=True)},
        subtitle="Lines are the loss of training, dots that of validation.",
        tables=[
            ReportTable("Runs", COLUMNS, [run.row() for run in runs]),
            ReportTable("Options in which they differ", ("option", *names), rows),
        ],
    )
    write(path, page.encode())
