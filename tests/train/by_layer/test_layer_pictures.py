"""Tests that a step by layers on images has the bits of a step as a whole, whatever of the vision tower trains."""

import json
import re
import shutil

import pytest
from PIL import Image

import counted_programs
import vision
from console import called
from deltatune.cli import main
from deltatune.data import BatchOrder
from deltatune.data.datasets import load_datasets
from deltatune.models.load import load
from deltatune.models.vision.split import FrozenTower
from deltatune.options.config import TrainConfig
from deltatune.train import setup
from killed_runs import adapters
from layer_runs import assert_same_bits, by_layers, options, whole
from vision_runs import options as run_flags

pytest.importorskip("mlx_vlm")


@pytest.fixture(scope="module")
def batch_of(pictures):
    """batch_of(checkpoint) -> a batch of rows with no, one and two images."""

    def made(path):
        loaded = load(path, lazy=True, image="a test")
        config = TrainConfig(data=str(pictures), batch_size=3)
        examples = load_datasets(config, loaded.tokenizer, setup.vision_processors(loaded)).train
        return next(BatchOrder(examples[:3], 3, 2048))

    return made


CASES = {
    "a tower at rest": ("qwen3_5", {"dropout": 0.1}),
    "a tower that trains": ("qwen3_5", {"parts": "language,vision,projector"}),
    "deeper features": ("qwen3_vl", {"num_layers": 1}),
    "deeper features that train": ("qwen3_vl", {"parts": "language,vision,projector", "dropout": 0.2}),
    "experts": ("qwen3_vl_moe", {"router_aux_loss_coef": 0.1, "parts": "language,projector"}),
    "experts beside recurrence": ("qwen3_5_moe", {}),
}


OFTEN = ("deeper features that train", "experts")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.weekly] * (case not in OFTEN)) for case in CASES]
)
def test_a_step_by_layers_has_the_bits_of_a_whole_step(tiny_vision_checkpoint, batch_of, case):
    family, changes = CASES[case]
    folder = tiny_vision_checkpoint(family)
    config, given = options(folder, **changes), batch_of(folder)
    assert given.images is not None
    expected, loss = whole(folder, config, given, "a test")
    found, same_loss, weights, _ = by_layers(folder, config, given, image="a test")
    assert_same_bits(expected, found)
    assert loss == same_loss
    assert weights.disk.read > 0


def test_a_bounded_run_on_images_has_the_bits_of_one_without(tiny_vision_checkpoint, pictures, tmp_path, capsys):
    """Layers of 0.8 MB each; the loss of its adapter is the same within the same memory."""
    model = tiny_vision_checkpoint("qwen3_5", intermediate_size=1024)
    more = {"iters": 2, "batch-size": 3, "val-batches": 0}
    flags = run_flags(model, pictures, tmp_path / "whole", **more)
    assert main(["train", *flags, "--grad-checkpoint"]) == 0
    flags = run_flags(model, pictures, tmp_path / "bounded", **more)
    assert main(["train", *flags, "--memory", "1MB"]) == 2
    least = re.search(r"take ([\d.]+) MB", capsys.readouterr().err)
    memory = str(round(float(least[1]) * 1e6))
    assert main(["train", *flags, "--memory", memory]) == 0
    assert "4 of 4 layers" in capsys.readouterr().out
    assert adapters(tmp_path / "bounded") == adapters(tmp_path / "whole")
    flags = ["--model", str(model), "--data", str(pictures), "--batch-size", "3", "--test-batches", "1"]
    flags += ["--adapter-path", str(tmp_path / "whole")]
    assert main(["eval", *flags]) == 0
    expected = capsys.readouterr().out
    assert main(["eval", *flags, "--memory", "1MB"]) == 2
    least = re.search(r"take ([\d.]+) MB", capsys.readouterr().err)
    assert main(["eval", *flags, "--memory", str(round(float(least[1]) * 1e6))]) == 0
    found = capsys.readouterr().out
    assert "4 of 4 layers" in found
    assert found.splitlines()[-1] == expected.splitlines()[-1]


@pytest.mark.parametrize("family", [pytest.param("qwen3_5", marks=pytest.mark.weekly), "qwen3_vl"])
def test_an_answer_to_pictures_within_a_bound_is_the_one_without(tiny_vision_checkpoint, pictures, capsys, family):
    """Layers of 0.8 MB each."""
    model = tiny_vision_checkpoint(family, intermediate_size=1024)
    files = [pictures / "2_0.png", pictures / "2_1.png"]
    flags = ["generate", "--model", model, "--prompt", "which?", "-m", "3", "--verbose", "false", "--image", *files]
    flags = list(map(str, flags))
    assert main(flags) == 0
    expected = capsys.readouterr().out
    found = counted_programs.within_the_least_memory(main, flags, capsys)
    assert re.search(r"(\d) of \1 layers", found.err)
    assert found.out == expected


# Of the 64 tokens of a picture of 128 x 128 pixels, each with features of 64 channels for three layers.
FEATURES = 64 * 64 * 3 * 4


@pytest.fixture(scope="module")
def many_pictures(tmp_path_factory):
    """A folder of data: five rows with a picture each."""
    folder, rows = tmp_path_factory.mktemp("many"), []
    for index in range(5):
        Image.new("RGB", (128, 128), (30 * index, 20, 90)).save(folder / f"{index}.png")
        turns = [{"role": "user", "content": "<image>which?"}, {"role": "assistant", "content": "none"}]
        rows.append(json.dumps({"messages": turns, "images": [f"{index}.png"]}))
    (folder / "train.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def of_large_pictures(tiny_vision_checkpoint, tmp_path_factory):
    """A model that looks at pictures of up to 128 x 128 pixels whole, with layers of 0.8 MB each."""
    folder = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(tiny_vision_checkpoint("qwen3_vl", intermediate_size=1024), folder)
    vision.write_processor(folder, longest_edge=128 * 128)
    return folder


@pytest.mark.parametrize("more", [0, pytest.param(1_000_000_000, marks=pytest.mark.weekly)])
def test_cached_features_stay_within_the_bound(of_large_pictures, many_pictures, tmp_path, monkeypatch, more):
    kept, plain = [0], FrozenTower.__call__

    def counted(tower, batch):
        result = plain(tower, batch)
        kept.append(tower.cached_bytes)
        return result

    monkeypatch.setattr(FrozenTower, "__call__", counted)
    flags = run_flags(of_large_pictures, many_pictures, tmp_path / "out", **{"iters": 5, "batch-size": 1})
    refused = called("train", *flags, "--memory", "1MB")
    memory = round(float(re.search(r"take ([\d.]+) MB", refused.stderr)[1]) * 1e6) + more
    said = called("plan", *flags, "--memory", memory).stdout
    planned = float(re.search(r"([\d.]+) MB planned of", said)[1]) * 1e6
    assert called("train", *flags, "--memory", memory).returncode == 0
    assert planned + max(kept) <= memory
    assert max(kept) == 5 * FEATURES if more else max(kept) < 3 * FEATURES
    assert more == 0 or re.search(r"features of images take up to [\d.]+ [MG]B of the rest", said)
