"""Trains the demo's model for a few steps: as a whole, stopped and resumed, on two ranks; and runs the whole demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from rich.console import Console

from ..data.datasets import load_datasets
from ..demo import run_demo, task
from ..demo.assets import MODEL
from ..demo.screen import DemoScreen
from ..machine import backend
from ..models.load import load
from ..ops.operator.measure import as_float64, relative_norm
from ..ops.operators import GATED_DELTA
from ..options.config import LoraConfig, TrainConfig
from ..train import Trainer
from ..train.reports.screen import Screen
from ..train.setup import prepare
from ..train.tree import leaves
from .outcome import FAILED, PASSED, Check, Outcome, compared_with_bounds, not_run

STEPS = 4
# Bounds on the error of each loss, and on that of the weights relative to their change: those of the replays.
_LOSS, _CHANGE = 1e-4, 1e-3
_SECONDS = 300
_Weights = dict[str, np.ndarray]


def _trained(folder: Path, **changes: Any) -> tuple[list[float], _Weights]:
    """Train a few steps on the demo's data with the output in `folder`; returns losses and trained weights."""
    data = folder.parent / "data"
    if not data.exists():
        task.write(data, train=64, valid=8, test=8)
    config = TrainConfig(**_options(data, folder) | changes)
    loaded = load(MODEL, from_scratch=config.from_scratch, seed=config.seed)
    prepare(loaded.model, config)
    splits = load_datasets(config, loaded.tokenizer)
    screen = Screen(shown=False)
    Trainer(loaded.model, loaded.tokenizer, config, splits, model_config=loaded.config, screen=screen).run()
    return _losses(folder), {name: as_float64(leaf) for name, leaf in leaves(loaded.model.trainable_parameters())}


def _options(data: Path, folder: Path) -> dict[str, Any]:
    """Options of a training run by plain gradient descent; Adam would turn a rounding error into a whole step."""
    return {
        "model": str(MODEL),
        "data": str(data),
        "adapter_path": str(folder),
        "iters": STEPS,
        "batch_size": 4,
        "max_seq_length": 128,
        "lr_schedule": "constant",
        "warmup": 0.0,
        "lora_parameters": LoraConfig(rank=4, scale=2.0),
        "optimizer": "sgd",
        "learning_rate": 0.02,
        "steps_per_report": 1,
        "steps_per_eval": STEPS,
        "val_batches": 1,
        "save_every": STEPS,
    }


def _losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train_loss"] for record in records if "train_loss" in record]


def _compare(here: tuple[list[float], _Weights], expected: tuple[list[float], _Weights], start: _Weights) -> Outcome:
    """Compare the losses and the weights of two training runs that began with the weights `start`."""
    loss = float(np.max(np.abs(np.subtract(here[0], expected[0]))))
    change = np.concatenate([(expected[1][name] - start[name]).ravel() for name in start])
    found_change = np.concatenate([(here[1][name] - start[name]).ravel() for name in start])
    return compared_with_bounds(
        {"loss": loss, "weights": relative_norm(found_change, change)}, {"loss": _LOSS, "weights": _CHANGE}
    )


def _start(**changes: Any) -> _Weights:
    config = TrainConfig(**_options(Path(), Path()) | changes)
    model = load(MODEL, from_scratch=config.from_scratch, seed=config.seed).model
    prepare(model, config)
    return {name: as_float64(leaf) for name, leaf in leaves(model.trainable_parameters())}


@contextmanager
def _recurrence_on_cpu() -> Iterator[None]:
    """Within it, MLX computes on the CPU and gated_delta token by token, which is the reference."""
    forced = os.environ.get(GATED_DELTA.variable)
    os.environ[GATED_DELTA.variable] = "naive"
    try:
        with mx.stream(mx.cpu):
            yield
    finally:
        del os.environ[GATED_DELTA.variable]
        if forced is not None:
            os.environ[GATED_DELTA.variable] = forced


def full_fine_tuning() -> Outcome:
    """Compare full fine-tuning on this device with the same run on the CPU by the recurrence."""
    with tempfile.TemporaryDirectory() as folder:
        here = _trained(Path(folder) / "here", fine_tune_type="full")
        with _recurrence_on_cpu():
            start = _start(fine_tune_type="full")
            expected = _trained(Path(folder) / "there", fine_tune_type="full")
    return _compare(here, expected, start)


def stopped_and_resumed(from_scratch: bool) -> Outcome:
    """Compare a packed run that is stopped and resumed with an uninterrupted one; both must have equal bits.

    One from scratch trains the embeddings too, of which MLX sums the gradient in another order each time on a GPU; so
    there the two runs may differ by rounding.
    """
    options = {"from_scratch": from_scratch, "fine_tune_type": "full", "pack": True}
    with tempfile.TemporaryDirectory() as folder:
        losses, whole = _trained(Path(folder) / "whole", **options)
        _trained(Path(folder) / "parts", **options, iters=STEPS // 2)
        _, parts = _trained(Path(folder) / "parts", **options, resume=True)
        again = _losses(Path(folder) / "parts")
    differing = [name for name in whole if not np.array_equal(whole[name], parts[name])]
    if not differing and again == losses:
        return Outcome(PASSED, f"the same bits in {len(whole):,} weights and {len(losses):,} losses")
    if from_scratch and backend.adds_in_any_order():
        return _compare((again, parts), (losses, whole), _start(**options))
    return Outcome(FAILED, f"{len(differing):,} of {len(whole):,} weights differ; losses {again}, in one go {losses}")


def two_ranks() -> Outcome:
    """Compare two processes under mlx.launch, half the batch each, with one process that has the whole batch."""
    beside = Path(sys.executable).with_name("mlx.launch")
    launcher = str(beside) if beside.is_file() else shutil.which("mlx.launch")
    if launcher is None:
        return not_run("mlx.launch is not installed beside this Python")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = _trained(folder / "one")
        options = _options(folder / "data", folder / "two")
        (folder / "run.json").write_text(json.dumps(options | {"lora_parameters": {"rank": 4, "scale": 2.0}}))
        program = folder / "program.py"
        program.write_text("import sys\nfrom deltatune.cli import main\nsys.exit(main(['train', *sys.argv[1:]]))\n")
        command = [launcher, "-n", "2", "--backend", "ring", "--python", sys.executable, str(program)]
        command += ["-c", str(folder / "run.json")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return Outcome(FAILED, f"two ranks were not done after {_SECONDS} s")
        if done.returncode:
            return Outcome(FAILED, f"mlx.launch ended with {done.returncode}: {done.stderr.strip()[-400:]}")
        weights: Any = mx.load(str(folder / "two" / "adapters.safetensors"))
        here = _losses(folder / "two"), {key: as_float64(weights[key]) for key in expected[1]}
    return _compare(here, expected, _start())


def checks(quick: bool) -> Iterator[Check]:
    """The training checks, of which `quick` runs only the resumed runs."""
    if not quick:
        yield Check("training: full fine-tuning", full_fine_tuning)
    yield Check("training: packed, stopped and resumed", partial(stopped_and_resumed, False))
    yield Check("training: from scratch, packed, stopped and resumed", partial(stopped_and_resumed, True))
    if not quick:
        yield Check("training: two ranks", two_ranks)


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


def demo_checks(quick: bool, console: Console) -> Iterator[Check]:
    """The demo, which takes two minutes; `quick` leaves it out."""
    if not quick:
        yield Check("demo", partial(demonstrated, console))
