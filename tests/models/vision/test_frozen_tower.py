"""Vision towers: frozen ones compute each image once, with the same bits in any batch; others are refused by name."""

import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import other_towers
import vision
from deltatune.data import Batch
from deltatune.errors import UserError
from deltatune.lora import convert_to_lora
from deltatune.models.load import load, new_model
from deltatune.models.vision import split as frozen
from deltatune.models.vision.inputs import vision_batch
from deltatune.models.vision.split import vision_spec
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.patches import patched
from deltatune.train.batch_loss import arrays, counted_positions, mean_loss_and_gradients
from deltatune.train.setup import choose_loss, prepare

pytest.importorskip("mlx_vlm")

GRIDS = [[(1, 4, 6), (1, 2, 2)], [], [(2, 6, 4), (1, 4, 16)], [(1, 2, 8)]]
WIDTH = 64


def batch(spec, grids=GRIDS, seed=0):
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


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
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


def test_counted_positions_are_made_up_to_quarters():
    weights = np.zeros((2, 16), np.float32)
    weights[1, 3:12] = 1
    found = counted_positions(weights)
    assert found.dtype == np.int32
    assert len(found) == 16
    assert set(range(19, 28)) < set(found.tolist())
    assert len(set(found.tolist())) == 16
    assert (np.diff(found) > 0).all()
    assert counted_positions(np.ones((2, 16))) is None
    assert len(counted_positions(np.zeros((2, 16)))) == 8


@pytest.mark.parametrize("family", ["glm5_next", "kimi_vl", "kimi_k25", "kimi_k3"])
def test_another_tower_is_refused_by_name(family):
    with pytest.raises(UserError) as caught:
        vision_spec(other_towers.build(family))
    said = str(caught.value)
    assert said.startswith(f"mlx_vlm.models.{family}.{family}: this layer cannot be trained: the vision tower")
    assert "pos_embed" in said
    assert "\n" not in said


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3"])
def test_a_model_without_a_tower_is_refused_by_name(tiny_checkpoint, family):
    with pytest.raises(UserError, match=r"x:1: has an image, and model .* has no vision tower"):
        load(tiny_checkpoint(family), image="x:1")


@pytest.mark.parametrize("family", ["kimi_vl", "kimi_k25"])
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


def test_text_that_mlx_lm_does_not_know_is_named(tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(json.dumps(other_towers.config("glm5_next")))
    with pytest.raises(UserError, match=r"'glm5_next' is of a kind that mlx-lm .* does not know"):
        load(tmp_path / "a")
