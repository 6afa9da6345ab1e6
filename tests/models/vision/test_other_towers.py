"""Models of mlx-vlm with towers that are not trained on images: refused by name; their text trains through mlx-lm."""

import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import other_towers
from deltatune.errors import UserError
from deltatune.lora import convert_to_lora
from deltatune.models.load import load, new_model
from deltatune.models.vision.split import vision_spec
from deltatune.options.config import LoraConfig
from deltatune.patches import patched
from deltatune.train.setup import choose_loss

pytest.importorskip("mlx_vlm")


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
