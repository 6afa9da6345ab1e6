"""Helpers for tests that train on images or videos: flags of a short run, and checks that hold for both."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from deltatune import cli
from deltatune.data import BatchOrder
from deltatune.data.datasets import load_datasets
from deltatune.models.load import load
from deltatune.options.config import TrainConfig
from deltatune.patches import patched
from deltatune.train import setup
from deltatune.train.batch_loss import arrays, loss_of


def options(model: Path, folder: Path, target: Path, **more: Any) -> list[str]:
    """Return the flags of a short run on the data in `folder` into `target`; `more` adds or replaces flags."""
    flags = {"model": model, "data": folder, "adapter-path": target, "iters": 6, "batch-size": 4, "warmup": 0}
    flags |= {"lr-schedule": "constant", "learning-rate": 2e-3, "steps-per-report": 2, "steps-per-eval": 6} | more
    return [part for key, value in flags.items() for part in (f"--{key}", str(value))]


def check_batch_weighs_as_its_rows(path: Path, folder: Path) -> None:
    """Check that the loss of a batch of four rows, with differing numbers of pictures, is that of the four alone."""
    loaded = load(path, image="a test")
    config = TrainConfig(data=str(folder), batch_size=4)
    examples = load_datasets(config, loaded.tokenizer, setup.vision_processors(loaded)).train[:4]
    with patched(loaded.model):
        loss, _ = setup.choose_loss(loaded.model)
        together = loss_of(loss, arrays(next(BatchOrder(examples, 4, 2048))))
        alone = [loss_of(loss, arrays(next(BatchOrder([example], 1, 2048)))) for example in examples]
    assert together[1].item() == sum(weight.item() for _, weight in alone)
    assert together[0].item() == pytest.approx(sum(total.item() for total, _ in alone), rel=1e-4)


def check_resumed_run_is_bit_equal(model: Path, folder: Path, target: Path, part: int, **more: Any) -> None:
    """Check that a run that stops after `part` iterations and is resumed ends with the bits of one that never stops."""
    assert cli.main(["train", *options(model, folder, target / "straight", **more)]) == 0
    assert cli.main(["train", *options(model, folder, target / "again", **more | {"iters": part})]) == 0
    assert cli.main(["train", *options(model, folder, target / "again", **more), "--resume"]) == 0
    straight, again = (mx.load(str(target / name / "adapters.safetensors")) for name in ("straight", "again"))
    assert straight.keys() == again.keys()
    assert all(mx.array_equal(value, again[name]) for name, value in straight.items())
