"""Keeps the progress of a run: in metrics.jsonl, and in services such as TensorBoard."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import UserError, reason
from ...machine import atomic_files
from ..saved.state import refusal, writing

Record = dict[str, Any]
# The key under which a record of metrics.jsonl holds answers.
SAMPLES = "samples"
# The key under which an answer that training has sampled holds the sum of its rewards, as text, empty without rewards.
REWARD = "reward"


def is_right(sample: Record) -> bool | None:
    """Return whether an answer is the expected one, but for white space around it; None where none is expected."""
    return sample["answer"].strip() == sample["expected"].strip() if "expected" in sample else None


def _kind(samples: Sequence[Record]) -> str:
    """Return the name of some answers in a service: TRL's for those that training has sampled."""
    return "completions" if any(REWARD in sample for sample in samples) else SAMPLES


def tally(samples: Sequence[Record]) -> str:
    """Return how many answers are right, such as `2 of 3 right`; an empty text where none is expected."""
    judged = [right for right in map(is_right, samples) if right is not None]
    return f"{sum(judged):,} of {len(judged):,} right" if judged else ""


# A service has the methods of this class: check() refuses what cannot be opened, log() takes figures by name.
class TensorBoard:
    """Writes scalars and texts to `<directory>/tensorboard` with TensorBoard's own writers."""

    @staticmethod
    def check(directory: Path) -> None:
        """Refuse a missing library, and a folder that cannot be written."""
        _library("tensorboard", "tensorboard.summary")
        folder = directory / "tensorboard"
        try:
            if os.path.lexists(folder):
                tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UserError(f"--report-to tensorboard: {refusal(folder, error)}") from error

    def __init__(self, directory: Path, project: str, options: Record):
        writer = _library("tensorboard", "tensorboard.summary").Writer
        try:
            self._writer = writer(str(directory / "tensorboard"))
        except OSError as error:
            raise UserError(f"--report-to tensorboard: {refusal(directory / 'tensorboard', error)}") from error
        self._folder = str(directory / "tensorboard")
        self._texts: Any = None

    def log(self, record: Record, iteration: int) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, iteration)

    def log_samples(self, samples: Sequence[Record], iteration: int) -> None:
        events = _library("tensorboard", "tensorboard.compat.proto.event_pb2")
        text_pb = _library("tensorboard", "tensorboard.plugins.text.summary_v2").text_pb
        if self._texts is None:
            files = _library("tensorboard", "tensorboard.summary.writer.event_file_writer")
            self._texts = files.EventFileWriter(self._folder)
        for number, sample in enumerate(samples, 1):
            # TensorBoard shows texts as Markdown, in which four spaces keep a line as it is.
            texts = [sample[name] for name in ("prompt", "expected", "answer", REWARD) if name in sample]
            parts = ["\n".join(f"    {line}" for line in text.splitlines()) for text in texts]
            summary = text_pb(f"{_kind(samples)}/{number}", "\n\n---\n\n".join(parts))
            self._texts.add_event(events.Event(wall_time=time.time(), step=iteration, summary=summary))
        self._texts.flush()

    def close(self) -> None:
        self._writer.close()
        if self._texts is not None:
            self._texts.close()


class WandB:
    """Logs to a Weights & Biases run that is named after the output folder."""

    @staticmethod
    def check(directory: Path) -> None:
        """Refuse a missing library, a missing login, and a server that cannot be reached, unless W&B is offline."""
        wandb = _library("wandb", "wandb")
        with _explained(wandb):
            wandb.login(verify=True)

    def __init__(self, directory: Path, project: str, options: Record):
        self._library = _library("wandb", "wandb")
        with _explained(self._library):
            self._library.init(project=project, name=directory.name, dir=str(directory), config=options)

    def log(self, record: Record, iteration: int) -> None:
        self._library.log(record, step=iteration)

    def log_samples(self, samples: Sequence[Record], iteration: int) -> None:
        names = ("prompt", "expected", "answer", REWARD)
        rows = [[iteration, *map(sample.get, names)] for sample in samples]
        table = self._library.Table(columns=["iteration", *names], data=rows)
        self._library.log({_kind(samples): table}, step=iteration)

    def close(self) -> None:
        self._library.finish()


class SwanLab(WandB):
    """Logs to a SwanLab experiment that is named after the output folder; its library has the functions of W&B's."""

    @staticmethod
    def check(directory: Path) -> None:
        """Refuse a missing library."""
        _library("swanlab", "swanlab")

    def __init__(self, directory: Path, project: str, options: Record):
        self._library = _library("swanlab", "swanlab")
        logs = str(directory / "swanlog")
        self._library.init(project=project, experiment_name=directory.name, logdir=logs, config=options)

    def log_samples(self, samples: Sequence[Record], iteration: int) -> None:
        texts = [self._library.Text(sample["answer"], caption=sample["prompt"]) for sample in samples]
        self._library.log({_kind(samples): texts}, step=iteration)


Service = TensorBoard | WandB
SERVICES: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "swanlab": SwanLab}


def _library(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--report-to {name}: its library is missing ({error}); pip install {name}") from error


@contextlib.contextmanager
def _explained(wandb: Any) -> Iterator[None]:
    try:
        yield
    except wandb.Error as error:
        raise UserError(
            f"--report-to wandb: W&B cannot be used ({reason(error)}). Run `wandb login` and check the network, or set "
            "WANDB_MODE=offline, which keeps the metrics on this machine until `wandb sync`."
        ) from error


def check_services(report_to: str | None, directory: Path) -> None:
    """Check, before a model is loaded, that the services that --report-to names can be opened."""
    for service in _named(report_to):
        service.check(directory)


def open_services(report_to: str | None, directory: Path, project: str | None, options: Record) -> list[Service]:
    """Open the services that --report-to names, separated by commas; one that cannot be used is a UserError.

    They show the options of the run, which writes to `directory`, below the project, by default the current folder's
    name.
    """
    opened: list[Service] = []
    with contextlib.ExitStack() as stack:
        for kind in _named(report_to):
            opened.append(kind(directory, project or Path.cwd().name or "deltatune", options))
            stack.callback(opened[-1].close)
        stack.pop_all()
    return opened


def _named(report_to: str | None) -> list[Any]:
    return [SERVICES[name] for name in report_to.split(",")] if report_to else []


def send(record: Record, services: Sequence[Service]) -> None:
    """Send a record of metrics or samples to the services; figures without a value are left out."""
    iteration = record["iteration"]
    samples = record.get(SAMPLES)
    numbers = {
        name: value for name, value in record.items() if name not in ("iteration", SAMPLES) and value is not None
    }
    for service in services:
        if numbers:
            service.log(numbers, iteration)
        if samples is not None:
            service.log_samples(samples, iteration)


class Metrics:
    """Writes `metrics.jsonl`, one JSON object per line; a refusal of the file system is a UserError.

    Of an existing file `keep` bytes stay: a continued run keeps its earlier lines.
    """

    def __init__(self, path: Path, keep: int = 0):
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, min(keep, path.stat().st_size))
            damaged = keep > 0 and not path.read_bytes().endswith(b"\n")
            self._file = open(path, "ab")  # noqa: SIM115 (closed by close)
            if damaged:
                # A line that was cut short must not spoil the next one.
                self._file.write(b"\n")

    def write(self, record: Record) -> int:
        """Append a record and return the file's length in bytes. NaN and infinity, which JSON lacks, become null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with writing(self._path):
            self._file.write(json.dumps(finite).encode() + b"\n")
            self._file.flush()
        return self._file.tell()

    def cut(self, length: int) -> None:
        """Truncate the file to `length` bytes."""
        with writing(self._path):
            # The open file is cut, so that one which was deleted or moved meanwhile keeps no state from being saved.
            self._file.truncate(length)
            self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        """Flush the file to the disk."""
        with writing(self._path):
            atomic_files.flush(self._file.fileno())

    def close(self) -> None:
        self._file.close()
