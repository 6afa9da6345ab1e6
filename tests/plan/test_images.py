"""Plans of steps with images agree with MLX's own peak, use the data's grids, and work on the command line."""

import gc
import json
import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from PIL import Image

from deltatune import cli
from deltatune.data.datasets import load_datasets
from deltatune.data.vision.media import largest_batch
from deltatune.machine import backend
from deltatune.machine.compiling import without_kernels
from deltatune.models.load import load
from deltatune.models.vision.inputs import ImageShapes, blank_vision_batch
from deltatune.models.vision.split import FrozenTower, vision_spec
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.patches import patched
from deltatune.plan import fit
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.device_limits import DeviceLimits
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape, blank_batch
from deltatune.train.distributed import World
from deltatune.train.setup import choose_loss, prepare, vision_processors
from deltatune.train.step import Step
from deltatune.train.updates.optimizer import build_optimizer

pytest.importorskip("mlx_vlm")

IMAGES = ImageShapes(3, 640)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes five rows: no image, one of 64 x 64, two of 32 x 32, one of 48 x 32, no image."""
    path = tmp_path_factory.mktemp("pictures")
    rows = []
    for index, sizes in enumerate(([], [(64, 64)], [(32, 32)] * 2, [(48, 32)], [])):
        names = [f"{index}-{number}.png" for number in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            Image.new("RGB", size, (200, 20, 20)).save(path / name)
        turns = [{"role": "user", "content": "which?"}, {"role": "assistant", "content": "red"}]
        rows.append(json.dumps({"messages": turns, "images": names}))
    (path / "train.jsonl").write_text("\n".join(rows))
    return path


ON_A_CPU = pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")


def measured_peak(model, config, rows, length):
    """The peak of the second step by MLX's own count."""
    images = blank_vision_batch(rows, length, IMAGES[:2], vision_spec(model))
    images.feature_rows[0, : IMAGES.frames] = np.arange(IMAGES.frames) * (IMAGES.patches // 4)
    batch = replace(blank_batch(rows, length, False), images=images)
    with patched(model), without_kernels():
        loss, _ = choose_loss(model)
        model.train()
        step = Step(model, build_optimizer(config), loss, World())
        for _ in range(2):
            mx.reset_peak_memory()
            mx.eval(step.micro_batch(batch, step.zeros()))
    return mx.get_peak_memory()


@ON_A_CPU
@pytest.mark.usefixtures("waiting_queue")
@pytest.mark.parametrize("parts", [pytest.param("language", marks=pytest.mark.weekly), "language,vision,projector"])
def test_a_plan_equals_the_memory_of_a_step(tiny_vision_model, parts):
    gc.collect()
    before = mx.get_active_memory()
    model, config = tiny_vision_model("qwen3_5"), TrainConfig(parts=parts, lora_parameters=LoraConfig(rank=8))
    prepare(model, config)
    mx.eval(model.parameters())
    plan = forecast_step(model, config, BatchShape(2, 128, IMAGES), ArrayLayout.measured())
    peak = measured_peak(model, config, 2, 128) - before
    assert plan.bytes.amount == pytest.approx(peak, rel=0.05)
    if parts != "language":
        fewer = forecast_step(model, config, BatchShape(2, 128, ImageShapes(1, 640)), ArrayLayout.measured())
        assert fewer.bytes.amount < 0.6 * plan.bytes.amount


@ON_A_CPU
@pytest.mark.usefixtures("waiting_queue")
def test_a_tower_by_itself_may_need_the_most(tiny_vision_model):
    gc.collect()
    before = mx.get_active_memory()
    model, config = tiny_vision_model("qwen3_vl"), TrainConfig()
    prepare(model, config)
    mx.eval(model.parameters())
    plan = forecast_step(model, config, BatchShape(1, 64, ImageShapes(1, 2048)), ArrayLayout.measured())
    assert plan.bytes.where == "the vision tower, before the step"
    with patched(model):
        tower = FrozenTower(model)
        mx.reset_peak_memory()
        mx.eval(tower.frame_features(blank_vision_batch(1, 64, (1, 2048), vision_spec(model)), 0, 2048))
    moments = 2 * plan.sizes["gradients"]
    assert plan.bytes.amount == pytest.approx(mx.get_peak_memory() - before + moments, rel=0.05)


@pytest.mark.parametrize("images", [IMAGES, None])
def test_a_plan_reads_no_weights(images, tiny_vision_checkpoint, tiny_checkpoint):
    path = tiny_vision_checkpoint("qwen3_vl") if images else tiny_checkpoint("qwen3_5", tie_word_embeddings=False)
    model = load(path, image="x:1" if images else None, lazy=True).model
    config = TrainConfig()
    prepare(model, config)
    before = mx.get_active_memory()
    forecast_step(model, config, BatchShape(2, 64, images), ArrayLayout.measured())
    weights = sum(value.nbytes for name, value in tree_flatten(model.parameters()) if "lora" not in name)
    assert mx.get_active_memory() - before < weights / 4


def test_the_largest_batch_has_the_rows_with_most_and_the_largest_image(tiny_vision_checkpoint, folder):
    loaded = load(tiny_vision_checkpoint("qwen3_vl"), image="x:1")
    config = TrainConfig(data=str(folder), min_pixels=256)
    examples = load_datasets(config, loaded.tokenizer, vision_processors(loaded)).train
    assert [largest_batch(examples, rows)[:2] for rows in (1, 2, 3, 6)] == [(2, 64), (3, 64), (4, 64), (6, 64)]
    assert largest_batch([examples[0]], 4)[:2] == (0, 0)
    assert largest_batch([], 4) is None


@pytest.fixture
def options(tiny_vision_checkpoint, folder, tmp_path):
    path = tiny_vision_checkpoint("qwen3_5")
    chosen = {"model": path, "data": folder, "adapter-path": tmp_path, "batch-size": 2, "iters": 1}
    return [part for key, value in chosen.items() for part in (f"--{key}", str(value))]


def test_plan_and_train_report_the_memory_of_images(options, monkeypatch, capsys):
    monkeypatch.setattr(fit, "device_limits", lambda: DeviceLimits(None, 12_000_000, "a test", "a test"))
    assert cli.main(["plan", *options]) == 0
    text = capsys.readouterr().out
    assert re.search(r"Step: 2 x 64 = 128 tokens", text), text
    assert re.search(r"Largest that fits, one at a time:\n  length: \d+.*\n  batch: \d+", text), text
    assert cli.main(["train", *options]) == 0
    assert "Plan: 2 x 64 tokens need" in capsys.readouterr().out


def test_a_run_with_images_that_does_not_fit_is_refused(options, monkeypatch, capsys):
    monkeypatch.setattr(fit, "device_limits", lambda: DeviceLimits(None, 100_000, "a test", "a test"))
    assert cli.main(["train", *options]) == 2
    assert "does not fit" in capsys.readouterr().err
