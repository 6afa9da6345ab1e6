"""Tests QLoRA on images, with 4- and 8-bit language towers from mlx-vlm's own converter, experts included."""

import json
import shutil

import mlx.core as mx
import pytest
from PIL import Image

from deltatune import cli
from deltatune.models.load import load

pytest.importorskip("mlx_vlm")

COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("colours")
    rows = []
    for name, colour in COLOURS.items():
        Image.new("RGB", (32, 32), colour).save(path / f"{name}.png")
        rows.append({"image": f"{name}.png", "prompt": "which?", "completion": name})
    for split in ("train", "valid"):
        (path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def quantized(source, target, bits):
    """Quantize `source` with mlx-vlm's converter, which leaves the vision tower as it is."""
    from mlx_vlm.convert import convert

    convert(str(source), str(target), quantize=True, q_group_size=32, q_bits=bits)
    shutil.copy(source / "preprocessor_config.json", target)
    return target


@pytest.mark.parametrize(
    ("family", "bits"), [("qwen3_5_moe", 4), ("qwen3_vl_moe", 8), pytest.param("qwen3_5", 8, marks=pytest.mark.weekly)]
)
def test_a_quantized_language_tower_trains_on_images(family, bits, tiny_vision_checkpoint, folder, tmp_path):
    sizes = {"moe_intermediate_size": 64} if "moe" in family else {}
    path = quantized(tiny_vision_checkpoint(family, **sizes), tmp_path / "base", bits)
    stored = {type(module).__name__ for _, module in load(path, image="a test").model.named_modules()}
    assert "QuantizedLinear" in stored
    assert ("QuantizedSwitchLinear" in stored) == ("moe" in family)
    flags = {"iters": 12, "batch-size": 3, "learning-rate": 1e-3, "steps-per-report": 1}
    flags |= {"model": path, "data": folder, "adapter-path": tmp_path / "a"}
    assert cli.main(["train", *(part for key, value in flags.items() for part in (f"--{key}", str(value)))]) == 0
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train_loss"] for line in lines if "train_loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    trained = mx.load(str(tmp_path / "a" / "adapters.safetensors"))
    moved = {name: mx.abs(value).max().item() for name, value in trained.items() if name.endswith("lora_b")}
    assert all(moved.values()), moved
    assert any("switch_mlp" in name for name in moved) == ("moe" in family)
