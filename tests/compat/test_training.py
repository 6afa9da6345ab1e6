"""Five steps of `deltatune train`: finite losses that move, the same as with the naive operator."""

import json
import math

import pytest
from cases import TEXT, VISION
from PIL import Image

from deltatune import cli

pytestmark = pytest.mark.compat
COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"prompt": f"question {n} " + "dog " * (n % 7), "completion": f"answer {n * 7} fox"} for n in range(24)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Rows with none, one and two images."""
    folder = tmp_path_factory.mktemp("pictures")
    rows = []
    for index in range(12):
        names = [list(COLOURS)[(index + place) % 3] for place in range(index % 3)]
        files = [f"{index}_{place}.png" for place in range(len(names))]
        for name, file in zip(names, files, strict=True):
            Image.new("RGB", (32 + 16 * (index % 2), 32), COLOURS[name]).save(folder / file)
        turns = [{"role": "user", "content": "<image>" * len(names) + "which?"}]
        turns.append({"role": "assistant", "content": " ".join(names) or "none"})
        rows.append({"messages": turns, "images": files})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def train(model, data, target) -> list[float]:
    """The loss of each of five steps."""
    options = {"model": model, "data": data, "adapter-path": target, "iters": 5, "batch-size": 4, "warmup": 0}
    # Small steps, and not Adam, whose first ones are signs of gradients, also of those that are rounding alone.
    options |= {"optimizer": "sgd", "learning-rate": 1e-4, "lr-schedule": "constant", "steps-per-report": 1}
    assert cli.main(["train", *(part for key, value in options.items() for part in (f"--{key}", str(value)))]) == 0
    lines = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    return [line["train_loss"] for line in lines if "train_loss" in line]


def check(model, data, target, record_property, monkeypatch) -> None:
    losses = train(model, data, target / "ours")
    record_property("losses", f"{losses[0]:.4f} to {losses[-1]:.4f}")
    assert len(losses) == 5
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == 5
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "naive")
    assert train(model, data, target / "naive") == pytest.approx(losses, abs=1e-4)


@pytest.mark.parametrize("family", TEXT)
def test_text(tiny_checkpoint, texts, tmp_path, record_property, monkeypatch, family):
    check(tiny_checkpoint(family), texts, tmp_path, record_property, monkeypatch)


@pytest.mark.parametrize("family", VISION)
def test_images(tiny_vision_checkpoint, pictures, tmp_path, record_property, monkeypatch, family):
    check(tiny_vision_checkpoint(family), pictures, tmp_path, record_property, monkeypatch)
