"""Tests runs on images and text: training of each part, adapters in mlx-vlm, merging, answers and resumed runs."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from PIL import Image

from deltatune import cli
from deltatune.data.datasets import load_datasets
from deltatune.errors import UserError
from deltatune.lora import convert_to_lora
from deltatune.models.load import load
from deltatune.models.merged_checkpoint import merge_checkpoint
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train import setup
from vision_runs import check_batch_weighs_as_its_rows, check_resumed_run_is_bit_equal, options

pytest.importorskip("mlx_vlm")

COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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


def train(model, folder, target, **more):
    return cli.main(["train", *options(model, folder, target, **more)])


def logits(model, example):
    """Return the logits that mlx-vlm's model computes for one example."""
    model.eval()
    model.language_model._position_ids = model.language_model._rope_deltas = None
    held = example.pictures
    more = {}
    if held.values:
        patches = [held.reader.read(value, "a test")[0].patches for value in held.values]
        more = {"pixel_values": mx.array(np.concatenate(patches)), "image_grid_thw": mx.array(held.grids)}
    return model(mx.array(example.tokens[None]), **more).logits


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_vl_moe", marks=pytest.mark.weekly)])
def test_a_run_learns_and_mlx_vlm_loads_the_adapter(tiny_vision_checkpoint, folder, tmp_path, family):
    from mlx_vlm import load as upstream_load

    path = tiny_vision_checkpoint(family)
    # mlx-vlm refuses adapters on experts that are given by name, so a mixture of experts is adapted by whole layers.
    parts = "language" if "moe" in family else "language,vision,projector"
    assert train(path, folder, tmp_path / "a", parts=parts) == 0
    losses = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    measured = [line["val_loss"] for line in losses if "val_loss" in line]
    assert measured[-1] < 0.9 * measured[0]

    loaded = setup.load(path, str(tmp_path / "a"), image="a test")
    config = TrainConfig(data=str(folder), batch_size=4)
    examples = load_datasets(config, loaded.tokenizer, setup.vision_processors(loaded)).train
    plain = load(path, image="a test")
    theirs, _ = upstream_load(str(path), adapter_path=str(tmp_path / "a"))
    for example in examples[:3]:
        ours = logits(loaded.model, example)
        assert mx.allclose(ours, logits(theirs, example), atol=1e-4)
        assert mx.abs(ours - logits(plain.model, example)).max() > 1e-2

    # A prompt without images is answered without the tower, and without what the adapter changes there.
    text = setup.load(path, str(tmp_path / "a"))
    example = next(example for example in examples if not example.pictures.values)
    assert mx.allclose(text.model(mx.array(example.tokens[None])), logits(loaded.model, example), atol=1e-4)

    assert cli.main(["merge", "--model", str(path), "--adapter-path", str(tmp_path / "a"), "--save-path",
                     str(tmp_path / "merged")]) == 0  # fmt: skip
    merged = load(tmp_path / "merged", image="a test")
    for example in examples[:3]:
        # A token for which two experts tie may be routed to the other one after the merge.
        difference = mx.abs(logits(merged.model, example) - logits(loaded.model, example))
        assert np.median(np.array(difference)) < 1e-4


@pytest.mark.parametrize(("part", "inside"), [
    ("language", "language_model.model.layers"),
    ("vision", "vision_tower.blocks"),
    ("projector", "vision_tower.merger|vision_tower.deepstack_merger_list"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_parts_train_by_themselves(tiny_vision_model, part, inside, kind):
    model = tiny_vision_model("qwen3_vl")
    convert_to_lora(model, LoraConfig(rank=2), fine_tune_type=kind, parts=[part])
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]
    if kind == "full" and part == "vision":
        inside = "vision_tower"
    assert names
    assert all(name.startswith(tuple(inside.split("|"))) for name in names)
    assert not any("merger" in name for name in names if part != "projector")


def test_an_adapter_that_mlx_vlm_refuses_is_announced_and_merges(tiny_vision_checkpoint, folder, tmp_path, capsys):
    path = tiny_vision_checkpoint("qwen3_vl_moe")
    assert train(path, folder, tmp_path / "a", parts="language,vision", iters=2) == 0
    assert "it cannot load this adapter" in capsys.readouterr().out
    loaded = setup.load(path, str(tmp_path / "a"), image="a test")
    merge_checkpoint(path, tmp_path / "a", tmp_path / "merged")
    config = TrainConfig(data=str(folder), batch_size=4)
    example = load_datasets(config, loaded.tokenizer, setup.vision_processors(loaded)).train[2]
    merged = load(tmp_path / "merged", image="a test")
    assert np.median(np.array(mx.abs(logits(merged.model, example) - logits(loaded.model, example)))) < 1e-4


def test_parts_that_are_not_there_are_named(tiny_vision_model, tiny_model):
    with pytest.raises(UserError, match="'towers' is not known"):
        convert_to_lora(tiny_vision_model("qwen3_vl"), LoraConfig(rank=2), parts=["towers"])
    with pytest.raises(UserError, match="loaded without a vision tower"):
        convert_to_lora(tiny_model("qwen3"), LoraConfig(rank=2), parts=["vision"])


def test_keys_reach_the_tower_too(tiny_vision_model):
    model = tiny_vision_model("qwen3_5")
    found = convert_to_lora(model, LoraConfig(rank=2, keys=["vision_tower.blocks.*.attn.qkv", "self_attn.q_proj"]))
    assert [path.split(".")[0] for path in found.converted].count("vision_tower") == 3
    assert len(found.converted) == 4


@pytest.mark.parametrize("family", [pytest.param("qwen3_5", marks=pytest.mark.weekly), "qwen3_vl_moe"])
def test_a_batch_weighs_as_its_rows_do(tiny_vision_checkpoint, folder, family):
    check_batch_weighs_as_its_rows(tiny_vision_checkpoint(family), folder)


@pytest.mark.parametrize("parts", ["vision", pytest.param("language", marks=pytest.mark.weekly)])
def test_a_stopped_run_resumes_bit_for_bit(tiny_vision_checkpoint, folder, tmp_path, parts):
    check_resumed_run_is_bit_equal(tiny_vision_checkpoint("qwen3_vl"), folder, tmp_path, 3, parts=parts)


def test_eval_and_generate_look_at_images(tiny_vision_checkpoint, folder, capsys):
    path = str(tiny_vision_checkpoint("qwen3_vl"))
    assert cli.main(["eval", "--model", path, "--data", str(folder), "--batch-size", "2"]) == 0
    image = str(folder / "1_0.png")
    assert cli.main(["generate", "--model", path, "--image", image, "--prompt", "which?", "--max-tokens", "3"]) == 0
    assert "prompt tokens" in capsys.readouterr().out
    assert cli.main(["generate", "--model", path, "--image", "none.png", "--prompt", "which?"]) == 2
    assert "--image none.png: no such file" in capsys.readouterr().err


def test_a_text_model_given_images_is_one_message(tiny_checkpoint, folder, tmp_path, capsys):
    assert train(tiny_checkpoint("qwen3"), folder, tmp_path / "a") == 2
    error = capsys.readouterr().err
    assert "train.jsonl:2: has an image" in error
    assert "Traceback" not in error


def test_show_batch_prints_rows_with_images(tiny_vision_checkpoint, folder, tmp_path, capsys):
    path = tiny_vision_checkpoint("qwen3_vl")
    assert cli.main(["train", *options(path, folder, tmp_path / "a"), "--show-batch"]) == 0
    assert "<|image_pad|>" in capsys.readouterr().out
