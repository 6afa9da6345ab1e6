"""A split vision-language model gives upstream's values, gradients and positions, in any batch."""

import importlib.util
import json
import re

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from PIL import Image

import vision
from checkpoint_copies import copied, rewritten
from deltatune import cli
from deltatune.errors import UserError
from deltatune.models.load import load
from deltatune.models.vision import split as taken_apart
from deltatune.models.vision.inputs import token_positions, vision_batch
from deltatune.models.vision.split import has_vision, split_vision, vision_arrays, vision_spec
from deltatune.patches import patched
from model_gradients import gradients

pytest.importorskip("mlx_vlm")

GRIDS = [[(1, 4, 6), (1, 2, 2)], [], [(1, 6, 4)]]


def rows(spec, grids=GRIDS, seed=0):
    """Rows of text and images of these grids, each as (tokens, positions, pictures)."""
    draw = np.random.default_rng(seed)
    return [vision.pictured_row(draw, spec, row) for row in grids]


def upstream(model, tokens, pictures):
    """The logits of one row from mlx-vlm's own forward pass."""
    model.language_model._position_ids = model.language_model._rope_deltas = None
    more = {}
    if pictures:
        more["pixel_values"] = mx.array(np.concatenate([picture.patches for picture in pictures]))
        more["image_grid_thw"] = mx.array([picture.grid for picture in pictures])
    return model(mx.array(tokens[None]), **more).logits[0]


@pytest.mark.parametrize("family", vision.VISION_FAMILIES)
def test_a_batch_has_the_logits_and_gradients_of_upstreams_rows(tiny_vision_model, family):
    model = tiny_vision_model(family)
    spec = vision_spec(model)
    batch = rows(spec)
    width = 40
    ready = vision_batch(batch, width, spec)
    assert ready.patches.shape[0] == 3
    targets = mx.random.normal((3, width, 320))

    def ours(tokens, images):
        return split.head(split.backbone(tokens, images))

    def loss(model):
        found = ours(tokens, vision_arrays(ready))
        return sum((found[i, : len(row[0])] * targets[i, : len(row[0])]).sum() for i, row in enumerate(batch))

    def theirs(model):
        each = [upstream(model, tokens, pictures) for tokens, _, pictures in batch]
        return sum((found * targets[i, : len(found)]).sum() for i, found in enumerate(each))

    padded = np.zeros((3, width), np.int32)
    for index, (tokens, _, _) in enumerate(batch):
        padded[index, : len(tokens)] = tokens
    tokens = mx.array(padded)
    model.train()
    with patched(model):
        split = split_vision(model)
        assert_same_gradients(gradients(model, theirs), gradients(model, loss))


def assert_same_gradients(theirs, ours):
    """Assert that two results of gradients() differ by rounding only, and that the tower has a gradient."""
    (expected_loss, expected), (actual_loss, actual) = theirs, ours
    assert actual_loss == pytest.approx(expected_loss, rel=1e-4)
    assert expected.keys() == actual.keys()
    largest = max(mx.abs(value).max().item() for value in expected.values())
    wrong = {}
    for name, value in expected.items():
        size = max(mx.abs(value).max().item(), 1e-4 * largest)
        difference = mx.abs(value - actual[name]).max().item() / size
        if not difference < 2e-3:
            wrong[name] = difference
    assert any(mx.abs(actual[name]).max() > 0 for name in actual if "vision_tower.blocks.0" in name)
    assert not wrong


@pytest.mark.parametrize("family", vision.VISION_FAMILIES)
def test_videos_have_the_logits_positions_and_gradients_of_upstream(tiny_vision_model, family):
    model = tiny_vision_model(family)
    spec = vision_spec(model)
    videos = [(3, 4, 6), (2, 2, 4)]
    tokens, positions, pictures = vision.pictured_row(np.random.default_rng(0), spec, videos, video=True)
    grids = mx.array(videos)
    expected, _ = model.language_model.get_rope_index(mx.array(tokens[None]), None, grids)
    np.testing.assert_array_equal(positions, np.array(expected)[:, 0])
    rows = mx.array(tokens[None])
    ready = vision_batch([(tokens, positions, pictures)], len(tokens), spec)
    assert ready.patches.shape[0] == 6
    targets = mx.random.normal((1, len(tokens), 320))
    pixels = mx.array(np.concatenate([picture.patches for picture in pictures]))

    def theirs(model):
        model.language_model._position_ids = model.language_model._rope_deltas = None
        return (model(rows, pixel_values_videos=pixels, video_grid_thw=grids).logits * targets).sum()

    def ours(model):
        return (split.head(split.backbone(rows, vision_arrays(ready))) * targets).sum()

    model.train()
    with patched(model):
        split = split_vision(model)
        assert_same_gradients(gradients(model, theirs), gradients(model, ours))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_positions_are_upstreams(tiny_vision_model, family):
    model = tiny_vision_model(family)
    spec = vision_spec(model)
    for tokens, positions, pictures in rows(spec, [[(1, 4, 6), (1, 2, 2)], [(1, 8, 2)], [(1, 2, 4)] * 3]):
        grid = mx.array([picture.grid for picture in pictures])
        expected, _ = model.language_model.get_rope_index(mx.array(tokens[None]), grid)
        np.testing.assert_array_equal(positions, np.array(expected)[:, 0])


def test_the_step_compiles_once_for_other_grids(tiny_vision_model):
    model = tiny_vision_model("qwen3_vl")
    spec = vision_spec(model)
    traced = []
    with patched(model):
        split = split_vision(model)

        def run(tokens, images):
            traced.append(tokens.shape)
            return split.backbone(tokens, images)

        compiled = mx.compile(run)
        for seed, grids in enumerate(([[(1, 4, 6)]], [[(1, 2, 2)]], [[(1, 6, 6)]])):
            batch = rows(spec, grids, seed)
            arrays = vision_arrays(vision_batch(batch, 64, spec))
            tokens = mx.array(np.pad(batch[0][0], (0, 64 - len(batch[0][0])))[None])
            assert mx.allclose(compiled(tokens, arrays), split.backbone(tokens, arrays), atol=1e-4)
    assert len(traced) == 1


def test_a_tower_that_computes_something_else_is_refused(tiny_vision_model, monkeypatch):
    model = tiny_vision_model("qwen3_5")
    run = taken_apart.run_tower
    monkeypatch.setattr(taken_apart, "run_tower", lambda *given: (run(*given)[0] * 1.01, []))
    with patched(model), pytest.raises(UserError, match="logits differ by"):
        split_vision(model)


def test_training_modes_stay_as_they_were(tiny_vision_model):
    model = tiny_vision_model("qwen3_5")
    model.train()
    model.vision_tower.eval()
    with patched(model):
        split_vision(model)
    assert model.language_model.training
    assert not model.vision_tower.training
    assert model.language_model._position_ids is None


def test_placeholders_and_features_must_agree(tiny_vision_model):
    spec = vision_spec(tiny_vision_model("qwen3_vl"))
    ((tokens, positions, pictures),) = rows(spec, [[(1, 4, 6), (1, 2, 2)]])
    with pytest.raises(ValueError, match="7 image tokens and 6 features"):
        vision_batch([(tokens, positions, pictures[:1])], 40, spec)
    with pytest.raises(ValueError, match="needs 6 tokens"):
        token_positions(tokens[:12], [(1, 4, 6)], spec)
    with pytest.raises(ValueError, match="only 1 images"):
        token_positions(tokens, [(1, 4, 6)], spec)


@pytest.mark.parametrize("family", vision.VISION_FAMILIES)
def test_loading_and_loading_from_scratch(tiny_vision_checkpoint, family):
    path = tiny_vision_checkpoint(family)
    loaded = load(path, image="train.jsonl:1")
    assert has_vision(loaded.model)
    assert loaded.processor.image_processor.patch_size == vision.PATCH
    scratch = load(path, image="train.jsonl:1", from_scratch=True, seed=3)
    names = {name: value.shape for name, value in tree_flatten(loaded.model.parameters())}
    assert names == {name: value.shape for name, value in tree_flatten(scratch.model.parameters())}


def test_missing_parts_are_named(tiny_vision_checkpoint, tmp_path):
    source = tiny_vision_checkpoint("qwen3_vl")
    lacking = copied(source, tmp_path / "a")
    (lacking / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"neither preprocessor_config.json nor processor_config.json"):
        load(lacking, image="x:1")
    # Of the second name mlx-vlm has a module, which is no model.
    for folder, kind in (("b", "unheard_of"), ("c", "base")):
        with pytest.raises(UserError, match=r"of a kind that mlx-vlm .* cannot load"):
            load(copied(source, tmp_path / folder, model_type=kind), image="x:1")
    damaged = copied(source, tmp_path / "d")
    with rewritten(damaged / "model.safetensors") as tensors:
        del tensors["vision_tower.blocks.0.attn.qkv.weight"]
    with pytest.raises(UserError, match=r"1 missing \(vision_tower.blocks.0.attn.qkv.weight\)"):
        load(damaged, image="x:1")


def test_a_processor_that_needs_torch_says_what_to_install(tiny_vision_checkpoint, monkeypatch, tmp_path, capsys):
    from mlx_vlm import utils

    def needs(*_, **__):
        raise ImportError("Qwen2VLImageProcessorFast requires the Torchvision library but it was not found.")

    monkeypatch.setattr(utils, "load_processor", needs)
    path = tiny_vision_checkpoint("qwen3_vl")
    with pytest.raises(UserError, match="pip install torch torchvision"):
        load(path, image="x:1")
    one_message(path, tmp_path, capsys, "Qwen2VLImageProcessorFast requires the Torchvision library")


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is here: nothing is missing")
def test_transformers_own_processor_needs_torch_and_it_is_said(tiny_vision_checkpoint, monkeypatch, tmp_path, capsys):
    """transformers' processor includes a video processor, which needs PyTorch. mlx-vlm's has none."""
    from mlx_vlm import utils
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    def theirs(path, **_):
        return Qwen3VLProcessor.from_pretrained(path)

    monkeypatch.setattr(utils, "load_processor", theirs)
    one_message(tiny_vision_checkpoint("qwen3_vl"), tmp_path, capsys, r"Qwen\dVL[A-Za-z]* requires")


def test_a_processor_that_needs_torch_only_to_cut_images_is_one_message(
    tiny_vision_checkpoint, monkeypatch, tmp_path, capsys
):
    from mlx_vlm import utils

    class Processor:
        def image_processor(self, *_, **__):
            raise ImportError("resize requires the PyTorch library but it was not found.\nInstall it.")

    monkeypatch.setattr(utils, "load_processor", lambda *_, **__: Processor())
    one_message(tiny_vision_checkpoint("qwen3_vl"), tmp_path, capsys, "train.jsonl:1: .*resize requires the PyTorch")


def one_message(model, folder, capsys, words):
    """Assert that `train` on a picture ends with exit code 2, and names `words` and packages to install in one line."""
    Image.new("RGB", (32, 32)).save(folder / "a.png")
    row = {"image": "a.png", "prompt": "what?", "completion": "black"}
    (folder / "train.jsonl").write_text(json.dumps(row))
    assert cli.main(["train", "--model", str(model), "--data", str(folder), "--adapter-path", str(folder / "out")]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(rf"deltatune: [^\n]*{words}[^\n]*pip install torch torchvision[^\n]*\n", error)
