"""Keys that transformers 5 writes in a form of its own, or leaves out, reach the models of mlx-lm and mlx-vlm.

Options that change transformers' logits and that mlx-lm's model does not read are refused.
"""

import json
import math
import shutil

import mlx.core as mx
import pytest

from deltatune.errors import UserError
from deltatune.layers import logits_of
from deltatune.models.load import load, new_model
from deltatune.models.transformers_configs import as_written, check_options, completed
from families import PLAIN

SIZES = PLAIN | {"max_position_embeddings": 512, "transformers_version": "5.23.0"}
KINDS = ["sliding_attention"] * 3 + ["full_attention"]
SLIDING = {"rope_type": "default", "rope_theta": 10000.0}
FULL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}


def windowed(kind, sliding=SLIDING, full=FULL):
    rope = {"sliding_attention": dict(sliding), "full_attention": dict(full)}
    own = {"head_dim": 16, "layer_types": KINDS, "sliding_window": 16, "rope_parameters": rope}
    return {"model_type": kind, **SIZES, **own}


def test_gemma_3_scales_the_positions_of_full_layers_alone():
    layers = new_model(windowed("gemma3_text")).layers
    assert [layer.self_attn.rope.scale for layer in layers] == [1, 1, 1, 1 / 8]
    assert [layer.self_attn.rope.base for layer in layers] == [10000, 10000, 10000, 1000000]


def test_gemma_3_with_a_tower_takes_the_sizes_of_its_text_part():
    model = new_model(
        {"model_type": "gemma3", "text_config": windowed("gemma3_text"), "transformers_version": "5.23.0"}
    )
    assert model.language_model.model.embed_tokens.weight.shape == (320, 64)
    assert model.layers[3].self_attn.rope.scale == 1 / 8


@pytest.mark.bad_input("scaled positions in layers with a sliding window, which mlx-lm's model cannot scale")
@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3"])
def test_scaled_sliding_layers_are_refused(kind):
    with pytest.raises(UserError, match=r"sliding_attention rope_type 'linear'"):
        new_model(windowed(kind, sliding=FULL))


def test_the_shortest_time_step_of_nemotron_h_is_that_of_transformers_model():
    config = {"model_type": "nemotron_h", "time_step_min": 0.25, "time_step_limit": [0.0, math.inf]}
    saved = config | {"transformers_version": "5.23.0"}
    assert completed(saved)["time_step_limit"] == [0.25, math.inf]
    assert completed(config)["time_step_limit"] == [0.0, math.inf]
    assert as_written(completed(saved), saved) == saved


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "exaone4", "falcon_h1"])
def test_keys_that_transformers_leaves_out_are_its_own_defaults(family):
    config = {"model_type": family, **SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    complete = completed(config)
    assert complete["rope_theta"] == 5000.0
    assert complete["head_dim"] in (16, 128)
    assert as_written(complete, config) == config


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("image", [None, "x:1"], ids=["mlx-lm", "mlx-vlm"])
def test_qwen3_vl_as_transformers_5_saves_it_is_loaded_by_both(tiny_vision_checkpoint, tmp_path, family, image):
    """Nested rope_parameters, a vision model_type, and no keys at their defaults: the logits are those of old names."""
    pytest.importorskip("mlx_vlm")
    old = tiny_vision_checkpoint(family)
    new = shutil.copytree(old, tmp_path / "new")
    config = json.loads((new / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_scaling")
    theta = text.pop("rope_theta")
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, "mrope_section": rope["mrope_section"]}
    text.pop("norm_topk_prob", None)
    config["vision_config"]["model_type"] = f"{family}_vision"
    for key in ("spatial_patch_size", "in_channels", "temporal_patch_size"):
        config["vision_config"].pop(key, None)
    (new / "config.json").write_text(json.dumps(config | {"transformers_version": "5.23.0"}))
    tokens = mx.array([[7, 8, 9, 300, 11]])
    expected = logits_of(load(old, image=image).model, tokens)
    assert mx.array_equal(logits_of(load(new, image=image).model, tokens), expected)
    broken = json.loads((new / "config.json").read_text())
    broken["text_config"]["rope_parameters"]["rope_theta"] = 10.0
    (new / "config.json").write_text(json.dumps(broken))
    assert not mx.array_equal(logits_of(load(new, image=image).model, tokens), expected)


def test_a_config_that_is_all_text_part_keeps_its_sizes_under_the_type_of_a_model_with_a_tower():
    """mlx-lm writes Qwen3.5's text models so; transformers' class of that type would fill in a text part of its own."""
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    complete = completed({"model_type": "qwen3_5", **SIZES, "num_hidden_layers": 3, "layer_types": kinds})
    assert "text_config" not in complete
    assert complete["full_attention_interval"] == 3


@pytest.mark.bad_input("{option} in a {family} model, which mlx-lm's model does not read")
@pytest.mark.parametrize(
    ("family", "option", "value"),
    [
        ("llama", "hidden_act", "relu"),
        ("qwen3_5_text", "hidden_act", "gelu"),
        ("gptj", "activation_function", "silu"),
        ("gemma3_text", "final_logit_softcapping", 30.0),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gpt_oss", "swiglu_alpha", 1.0),
    ],
)
def test_an_option_that_nobody_reads_is_refused(family, option, value):
    with pytest.raises(UserError, match=f"it sets {option} to .*mlx-lm's {family} computes with"):
        check_options({"model_type": family, option: value})


@pytest.mark.parametrize(
    ("family", "option", "value"),
    [
        ("llama", "hidden_act", "silu"),
        ("llama", "hidden_act", "swish"),
        ("gemma", "hidden_act", "gelu"),
        ("gemma2", "final_logit_softcapping", 10.0),
        ("nemotron", "hidden_act", "relu2"),
        ("granite", "logits_scaling", 8.0),
        ("gemma3_text", "final_logit_softcapping", None),
        ("unknown", "hidden_act", "relu"),
    ],
)
def test_an_option_that_is_read_or_as_ever(family, option, value):
    check_options({"model_type": family, option: value})


def test_the_text_part_of_a_model_with_a_tower_is_looked_at():
    with pytest.raises(UserError, match="final_logit_softcapping"):
        check_options(
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "final_logit_softcapping": 1.0}}
        )
