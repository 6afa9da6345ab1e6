"""A split vision model gives upstream's values and gradients in any batch; a frozen tower runs once an image."""

import importlib.util
import json
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from PIL import Image

import other_towers
import vision
from checkpoint_copies import copied, rewritten
from deltatune.data import Batch
from deltatune.errors import UserError
from deltatune.lora import convert_to_lora
from deltatune.models.load import load, new_model
from deltatune.models.vision import split as frozen
from deltatune.models.vision import split as taken_apart
from deltatune.models.vision.inputs import vision_batch
from deltatune.models.vision.split import has_vision, split_vision, vision_arrays, vision_spec
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.patches import patched
from deltatune.train.batch_loss import arrays, mean_loss_and_gradients
from deltatune.train.setup import choose_loss, prepare
from families import weekly_but
from model_gradients import gradients

pytest.importorskip("mlx_vlm")

GRIDS = [[(1, 4, 6), (1, 2, 2)], [], [(1, 6, 4)]]
# One without features in deeper layers, and one with those, experts and other GELUs than mlx-vlm has.
DAILY = ("qwen3_5", "qwen3_vl_moe")


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


@pytest.mark.parametrize("family", weekly_but(vision.VISION_FAMILIES, *DAILY))
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


@pytest.mark.parametrize("family", weekly_but(vision.VISION_FAMILIES, *DAILY))
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


@pytest.mark.parametrize("family", weekly_but(vision.VISION_FAMILIES, *DAILY))
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


def needs_torchvision(path, **_):
    raise ImportError("Qwen2VLImageProcessorFast requires the Torchvision library but it was not found.")


def transformers_own(path, **_):
    """It includes a video processor, which needs PyTorch. mlx-vlm's has none."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    return Qwen3VLProcessor.from_pretrained(path)


class Cutter:
    """A processor that needs PyTorch only to cut images."""

    def __init__(self, path, **_):
        pass

    def image_processor(self, *_, **__):
        raise ImportError("resize requires the PyTorch library but it was not found.\nInstall it.")


torch_is_here = pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="nothing is missing")


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (needs_torchvision, "Qwen2VLImageProcessorFast requires the Torchvision library"),
        pytest.param(transformers_own, r"Qwen\dVL[A-Za-z]* requires", marks=torch_is_here),
        (Cutter, "train.jsonl:1: .*resize requires the PyTorch"),
    ],
)
def test_a_processor_that_needs_torch_says_what_to_install(
    tiny_vision_checkpoint, monkeypatch, tmp_path, complaint, processor, words
):
    """`train` on a picture ends with one line, which names packages to install."""
    from mlx_vlm import utils

    monkeypatch.setattr(utils, "load_processor", processor)
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    row = {"image": "a.png", "prompt": "what?", "completion": "black"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    flags = ["--model", tiny_vision_checkpoint("qwen3_vl"), "--data", tmp_path, "--adapter-path", tmp_path / "out"]
    error = complaint("train", *flags)
    assert re.fullmatch(rf"deltatune: [^\n]*{words}[^\n]*pip install torch torchvision[^\n]*\n", error)


pytest.importorskip("mlx_vlm")

FRAMES = [[(1, 4, 6), (1, 2, 2)], [], [(2, 6, 4), (1, 4, 16)], [(1, 2, 8)]]
WIDTH = 64


def batch(spec, grids=FRAMES, seed=0):
    """Rows of text and images of these grids, with an answer at the end of each. One image is in two rows."""
    draw = np.random.default_rng(seed)
    rows = [vision.pictured_row(draw, spec, row, video=True) for row in grids]
    inputs = np.zeros((len(grids), WIDTH), np.int32)
    weights = np.zeros((len(grids), WIDTH), np.float32)
    for index, (tokens, _, _) in enumerate(rows):
        inputs[index, : len(tokens)] = tokens
        weights[index, len(tokens) - 3 : len(tokens)] = 1
    images = vision_batch(rows, WIDTH, spec)
    return Batch(inputs, np.roll(inputs, -1, 1), weights, None, ((),) * len(grids), ((),) * len(grids), images)


@pytest.mark.parametrize("family", weekly_but(["qwen3_5", "qwen3_vl"], "qwen3_vl"))
def test_losses_and_gradients_are_those_of_the_tower_in_the_step(tiny_vision_model, family):
    model = tiny_vision_model(family)
    prepare(model, TrainConfig())
    given = batch(vision_spec(model))
    plain = arrays(given)
    assert plain.images.pop("counted").size == given.weights.size // 4
    with patched(model):
        loss, _ = choose_loss(model)
        model.train()
        tower = frozen.frozen_tower(model)
        separate = arrays(given, tower)
        assert "features" in separate.images
        assert "tower" not in separate.images
        expected, actual = (mean_loss_and_gradients(model, loss, each) for each in (plain, separate))
        mx.eval(expected, actual)
    assert actual[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    assert actual[1].item() == expected[1].item()
    wanted, found = dict(tree_flatten(expected[2])), dict(tree_flatten(actual[2]))
    largest = max(mx.abs(value).max().item() for value in wanted.values())
    assert all(mx.abs(found[name] - value).max().item() < 1e-4 * largest for name, value in wanted.items())


@pytest.fixture
def tower_and_spec(tiny_vision_model):
    """A frozen tower, and the numbers that its inputs depend on."""
    model = tiny_vision_model("qwen3_vl")
    prepare(model, TrainConfig())
    return frozen.FrozenTower(model), vision_spec(model)


def one(found, row=0):
    """The features of the first frame's tokens, from every layer that gives some."""
    return [np.array(layer)[row : row + 6] for layer in (found["features"], *found["deep"])]


def test_bits_do_not_depend_on_the_batch_and_are_kept(tower_and_spec, monkeypatch):
    tower, spec = tower_and_spec
    first = one(tower(batch(spec, [[(1, 4, 6)]]).images))
    again = one(tower(batch(spec, [[(1, 4, 6)], [(1, 4, 32)]]).images))
    tower._cache.clear()
    anew = one(tower(batch(spec, [[(1, 4, 6)], [(1, 4, 32)]]).images))
    assert len(first) == 3
    assert all((a == b).all() and (a == c).all() for a, b, c in zip(first, again, anew, strict=True))
    monkeypatch.setattr(tower, "frame_features", lambda *_: pytest.fail("the tower ran twice"))
    assert (one(tower(batch(spec, [[(1, 4, 6)]]).images))[0] == first[0]).all()


def test_features_beyond_the_cache_are_recomputed(tiny_vision_model):
    model = tiny_vision_model("qwen3_vl")
    prepare(model, TrainConfig())
    tower, spec = frozen.frozen_tower(model, 10_000), vision_spec(model)
    found = [one(tower(batch(spec).images))[0] for _ in range(2)]
    assert (found[0] == found[1]).all()
    assert 0 < sum(each.nbytes for each in tower._cache.values()) == tower.cached_bytes <= 10_000


def test_a_batch_without_images_needs_no_tower(tower_and_spec):
    tower, spec = tower_and_spec
    assert tower(batch(spec, [[], []]).images) == {}


@pytest.mark.parametrize("parts", ["vision", "language,projector"])
def test_a_tower_that_trains_stays_in_the_step(tiny_vision_model, tiny_model, parts):
    model = tiny_vision_model("qwen3_5")
    prepare(model, TrainConfig(parts=parts))
    assert frozen.frozen_tower(model) is None
    assert frozen.frozen_tower(tiny_model("qwen3")) is None


@pytest.mark.parametrize("family", weekly_but(["glm5_next", "kimi_vl", "kimi_k25", "kimi_k3"], "kimi_vl"))
def test_another_tower_is_refused_by_name(family):
    with pytest.raises(UserError) as caught:
        vision_spec(other_towers.build(family))
    said = str(caught.value)
    assert said.startswith(f"mlx_vlm.models.{family}.{family}: this layer cannot be trained: the vision tower")
    assert "pos_embed" in said
    assert "\n" not in said


def test_a_model_without_a_tower_is_refused_by_name(tiny_checkpoint):
    with pytest.raises(UserError, match=r"x:1: has an image, and model .* has no vision tower"):
        load(tiny_checkpoint("qwen3"), image="x:1")


@pytest.mark.parametrize("family", weekly_but(["kimi_vl", "kimi_k25"], "kimi_vl"))
def test_its_text_trains_through_mlx_lm(family):
    model = new_model(other_towers.config(family))
    convert_to_lora(model, LoraConfig(rank=2), num_layers=-1)
    model.train()
    tokens = mx.random.randint(7, 300, (2, 9))
    with patched(model):
        loss, _ = choose_loss(model)

        def each(_):
            total, weight = loss(tokens[:, :-1], tokens[:, 1:], mx.ones((2, 8)))
            return total / weight

        value, gradients = nn.value_and_grad(model, each)(model)
        mx.eval(value, gradients)
    found = dict(tree_flatten(gradients))
    assert found
    # B begins as zero, so that only its gradient is there in the first step.
    assert all(mx.abs(value).max() > 0 for name, value in found.items() if name.endswith("lora_b"))
