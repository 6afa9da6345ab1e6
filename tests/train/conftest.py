"""Fixtures for training: a small hybrid model (one gated-delta and one attention layer), data, and trainers of both."""

import contextlib
import io
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from PIL import Image
from rich.console import Console

from deltatune.data import Batch, Splits
from deltatune.data.datasets import load_datasets
from deltatune.models.load import load
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train import Trainer, compiled, engine, iterations
from deltatune.train.iterations import Iterations
from deltatune.train.progress import Result
from deltatune.train.reports.screen import Screen
from deltatune.train.setup import prepare
from killed_runs import metrics, same
from launched_ranks import launched, launched_each

_STRAIGHT_RUNS: dict[str, Path] = {}


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """A data folder with 44 training, 6 validation and 6 test pairs, in two length buckets."""
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    rows = [
        {"prompt": f"question {n} " + "dog " * draw.randint(1, 9), "completion": f"answer {n * 7} fox"}
        for n in range(56)
    ]
    for name, part in (("train", rows[:44]), ("valid", rows[44:50]), ("test", rows[50:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


@pytest.fixture(scope="session")
def options(checkpoint, data_folder):
    """Options of a short run with accumulation, dropout, a schedule and clipping, which saves inside accumulations."""
    return {
        "model": str(checkpoint),
        "data": str(data_folder),
        "iters": 8,
        "batch_size": 4,
        "max_seq_length": 64,
        "lora_parameters": {"rank": 2, "scale": 10.0, "dropout": 0.1},
        "lr_schedule": {"name": "cosine_decay", "arguments": [5e-3, 10], "warmup": 2, "warmup_init": 1e-4},
        "grad_accumulation_steps": 2,
        "grad_clip": 1.0,
        "steps_per_report": 3,
        "steps_per_eval": 4,
        "save_every": 3,
    }


@pytest.fixture(scope="session")
def splits(options, checkpoint):
    config = TrainConfig(**options | {"lora_parameters": LoraConfig(**options["lora_parameters"])})
    return load_datasets(config, load(checkpoint).tokenizer)


COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Rows with no, one or two images of several sizes."""
    path = tmp_path_factory.mktemp("pictures")
    rows = []
    for index in range(12):
        names = [list(COLOURS)[(index + place) % 3] for place in range(index % 3)]
        files = []
        for place, name in enumerate(names):
            files.append(f"{index}_{place}.png")
            Image.new("RGB", (32 + 16 * (index % 2), 32), COLOURS[name]).save(path / files[-1])
        user = "<image>" * len(names) + "which?"
        answer = " ".join(names) or "none"
        turns = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns, "images": files})
    for split in ("train", "valid", "test"):
        (path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def screen_text():
    """A screen that records: `.screen` is for a trainer, and `.text()` returns its output."""
    console = Console(record=True, width=400, force_terminal=False, file=io.StringIO())
    return SimpleNamespace(screen=Screen(console=console), text=lambda: console.export_text())


@pytest.fixture
def make_trainer(options, splits, tmp_path, screen_text):
    """make_trainer(splits=..., **changes) returns a Trainer of a freshly loaded model, with changed options."""

    def factory(splits: Splits = splits, **changes: Any) -> Trainer:
        values = {"adapter_path": str(tmp_path / "out")} | options | changes
        config = TrainConfig(**values | {"lora_parameters": LoraConfig(**values["lora_parameters"])})
        loaded = load(config.model)
        prepare(loaded.model, config)
        mx.reset_peak_memory()
        return Trainer(
            loaded.model, loaded.tokenizer, config, splits, model_config=loaded.config, screen=screen_text.screen
        )

    return factory


@pytest.fixture
def straight_run(make_trainer, options, tmp_path_factory):
    """straight_run(**changes) -> the folder of a run in one go; one for each set of options and session, so read it."""

    def folder(**changes: Any) -> Path:
        key = repr(sorted((options | changes).items()))
        if key not in _STRAIGHT_RUNS:
            made = tmp_path_factory.mktemp("straight") / "run"
            make_trainer(adapter_path=str(made), **changes).run()
            _STRAIGHT_RUNS[key] = made
        return _STRAIGHT_RUNS[key]

    return folder


@pytest.fixture
def begun(straight_run, tmp_path):
    """begun(**changes) lays a run of three iterations, without evaluations, into the folder `out`, and returns it."""

    def copied(**changes: Any) -> Path:
        return shutil.copytree(straight_run(iters=3, val_batches=0, **changes), tmp_path / "out")

    return copied


@pytest.fixture
def run_with(monkeypatch):
    """run_with(trainer, act) runs the trainer, and calls act(iterations, batch) before each micro-batch."""

    def run(trainer: Trainer, act: Callable[[Iterations, Batch], Any]) -> Result:
        class Watched(Iterations):
            def _next_batch(self) -> Batch:
                batch = super()._next_batch()
                act(self, batch)
                return batch

        with monkeypatch.context() as patch:
            patch.setattr("deltatune.train.loop.Iterations", Watched)
            return trainer.run()

    return run


@pytest.fixture
def loses_nothing(make_trainer, tmp_path, monkeypatch):
    """loses_nothing(trainer, straight, (owner, name, function), error, said, **options) breaks a run and continues it.

    With `function` in its place, the run of these options raises the error, which says `said` (a regular expression),
    or has it as a note. Its continuation leaves the files of the run in the folder `straight`.
    """

    def check(
        trainer: Trainer,
        straight: Path,
        change: tuple[Any, str, Any],
        error: type[Exception],
        said: str,
        **options: Any,
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            with pytest.raises(error) as raised:
                trainer.run()
        notes = getattr(raised.value, "__notes__", [])
        assert re.search(said, " ".join([str(raised.value), *notes])), (raised.value, notes)
        mx.eval(trainer.model.parameters())
        make_trainer(resume=True, **options).run()
        same(tmp_path / "out", straight)

    return check


@pytest.fixture
def traced_ahead(monkeypatch):
    """Compiled functions are traced once before, as on an NVIDIA GPU. Kernels that are only built return zeros."""

    @contextlib.contextmanager
    def foreseen(trace_calls: Callable[[], object]) -> Iterator[None]:
        trace_calls()
        yield

    monkeypatch.setattr(compiled, "foreseen", foreseen)


@pytest.fixture
def early_starts(traced_ahead, monkeypatch):
    """Iterations are started early, as on an NVIDIA GPU; the list holds those during which another one was."""
    during: list[int] = []
    plain = engine.EarlyEngine._start_next

    def start_next(self: Any, after_update: bool) -> None:
        during.append(self.state.progress.iteration + 1)
        plain(self, after_update)

    monkeypatch.setattr(engine, "may_start_early", lambda *_: True)
    monkeypatch.setattr(iterations, "LONGEST", 1e9)
    monkeypatch.setattr(engine.EarlyEngine, "_start_next", start_next)
    return during


@pytest.fixture
def launch(tmp_path):
    """launch(options, *flags, ...) trains in two ranks, as launched() of launched_ranks.py says."""
    return partial(launched, tmp_path)


@pytest.fixture
def launch_each(tmp_path):
    """launch_each((options, *flags), ...) trains in two ranks by one set of options after another."""
    return partial(launched_each, tmp_path)


@pytest.fixture(scope="session")
def read_metrics():
    return metrics
