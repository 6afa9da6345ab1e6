"""What a run tells: lines or a progress bar for a person, metrics.jsonl for programs, and the services asked for."""

from __future__ import annotations

import importlib
import json
import math
import os
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ..config import nearest
from ..errors import UserError
from .state import refusal

Record = dict[str, Any]


class Service(Protocol):
    """Somewhere else that metrics go."""

    def log(self, record: Record, iteration: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars in `<directory>/tensorboard`, by TensorBoard's own writer."""

    def __init__(self, directory: Path, project: str, options: Record):
        writer = _library("tensorboard", "tensorboard.summary").Writer
        self._writer = writer(str(directory / "tensorboard"))

    def log(self, record: Record, iteration: int) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run named after the output folder."""

    def __init__(self, directory: Path, project: str, options: Record):
        self._wandb = _library("wandb", "wandb")
        self._wandb.init(project=project, name=directory.name, dir=str(directory), config=options)

    def log(self, record: Record, iteration: int) -> None:
        self._wandb.log(record, step=iteration)

    def close(self) -> None:
        self._wandb.finish()


class SwanLab:
    """A SwanLab experiment named after the output folder."""

    def __init__(self, directory: Path, project: str, options: Record):
        self._swanlab = _library("swanlab", "swanlab")
        logs = str(directory / "swanlog")
        self._swanlab.init(project=project, experiment_name=directory.name, logdir=logs, config=options)

    def log(self, record: Record, iteration: int) -> None:
        self._swanlab.log(record, step=iteration)

    def close(self) -> None:
        self._swanlab.finish()


SERVICES: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "swanlab": SwanLab}


def _library(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--report-to {name}: its library is missing ({error}); pip install {name}") from error


def open_services(report_to: str | None, directory: Path, project: str | None, options: Record) -> list[Service]:
    """The services in a comma-separated list. UserError for an unknown one, or one whose library is missing."""
    names = [name.strip().lower() for name in (report_to or "").split(",") if name.strip()]
    for name in names:
        if name not in SERVICES:
            known = ", ".join(SERVICES)
            raise UserError(f"--report-to: unknown service {name!r}{nearest(name, list(SERVICES))}; known: {known}.")
    default = Path.cwd().name or "deltatune"
    return [SERVICES[name](directory, project or default, options) for name in names]


class Metrics:
    """`metrics.jsonl`: one JSON object a line. `keep` bytes of an earlier run stay, what follows them is dropped."""

    def __init__(self, path: Path, keep: int = 0):
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, min(keep, path.stat().st_size))
            self._file = open(path, "ab")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise UserError(refusal(path, error)) from error

    def write(self, record: Record) -> int:
        """Append a record; numbers that JSON lacks (NaN, infinity) become null. Returns the length in bytes.

        UserError where the disk refuses.
        """
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            self._file.write(json.dumps(finite).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise UserError(refusal(self._path, error)) from error
        return self._file.tell()

    def cut(self, length: int) -> None:
        """Drop what was written after `length` bytes."""
        os.truncate(self._path, length)
        self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        """Make what was written durable."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(refusal(self._path, error)) from error

    def close(self) -> None:
        self._file.close()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich's own ends the process."""
        raise BrokenPipeError


class Screen:
    """Lines for a person; with a terminal also a bar. Silent where `shown` is False (ranks other than 0)."""

    def __init__(self, shown: bool = True, console: Console | None = None):
        self._shown = shown
        self._console = console or _Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def say(self, text: str) -> None:
        """Print one line, or several, above the bar."""
        if self._shown:
            try:
                self._console.print(Text(text))
            except OSError:
                # Nobody reads any more, since a terminal was closed for example: the run goes on.
                self._shown = False

    def start(self, done: int, total: int) -> None:
        """Show the bar, on a terminal; `done` of `total` iterations are behind us."""
        if not (self._shown and self._console.is_terminal):
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("training", total=total, completed=done, note="")
        self._bar.start()

    def advance(self, done: int, note: str) -> None:
        """Move the bar to `done` iterations, with the latest figures beside it."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description="training", note=note)

    def evaluating(self, done: int, total: int) -> None:
        """Say on the bar how far an evaluation has come."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"evaluating {done}/{total}")

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def duration(seconds: float) -> str:
    """`1:02:03` or `4:05`."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def train_line(record: Record, total: int, left: float) -> str:
    """The line of a training report."""
    norm = record["grad_norm"]
    return (
        f"Iter {record['iteration']}/{total}: train loss {record['train_loss']:.4f}, "
        f"grad norm {'-' if norm is None else format(norm, '.3g')}, lr {record['learning_rate']:.3g}, "
        f"{record['iterations_per_second']:.3g} it/s, {record['tokens_per_second']:,.0f} tok/s, "
        f"peak {record['peak_memory']:.3g} GB, {duration(left)} left"
    )


def validation_line(record: Record) -> str:
    """The line of an evaluation."""
    return f"Iter {record['iteration']}: val loss {record['val_loss']:.4f}, took {record['val_time']:.1f} s"
