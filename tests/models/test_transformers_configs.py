"""Checkpoints in transformers' layouts and with its configs load with transformers' logits, or are refused."""

import json
import math
import shutil

import mlx.core as mx
import pytest

from checkpoint_copies import copied, rewritten
from deltatune.errors import UserError
from deltatune.layers import logits_of
from deltatune.lora import convert_to_lora, save_adapters
from deltatune.models.checkpoint_writer import merge_checkpoint
from deltatune.models.load import load, load_model, load_vision_tower, new_model
from deltatune.models.transformers_configs import check_options, completed
from deltatune.options.config import LoraConfig
from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import CASES
from deltatune.selftest.parity.ours import write_save
from families import PLAIN
from saved_adapters import moved
from transformers_saves import write_as_text_alone, write_as_transformers

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


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "exaone4", "falcon_h1"])
def test_keys_that_transformers_leaves_out_are_its_own_defaults(family):
    config = {"model_type": family, **SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    complete = completed(config)
    assert complete["rope_theta"] == 5000.0
    assert complete["head_dim"] in (16, 128)


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


TOKENS = mx.array([[5, 6, 7, 8, 9]])


def equal(model, other, most=1e-5):
    return mx.abs(logits_of(model, TOKENS) - logits_of(other, TOKENS)).max().item() < most


def test_one_tensor_an_expert_loads_through_both_libraries_and_merges_through_both(tiny_vision_checkpoint, tmp_path):
    original = tiny_vision_checkpoint("qwen3_5_moe")
    base = write_as_transformers(original, tmp_path / "base")
    for name, read in (("text", lambda path: load_model(path)[0]), ("images", load_vision_tower)):
        model = read(base)
        assert equal(model, read(original))
        convert_to_lora(model, LoraConfig(rank=2, scale=2.0, keys=["*switch_mlp.up_proj", "*o_proj"]))
        moved(model)
        loader = "mlx-lm" if name == "text" else "mlx-vlm"
        save_adapters(model, tmp_path / f"{name}_adapter", {"model": str(base), "loader": loader})
        done = merge_checkpoint(base, tmp_path / f"{name}_adapter", tmp_path / name)
        assert len(done.changed) == 4 * 8 + 1
        assert equal(read(tmp_path / name), model)
        assert (
            mx.load(str(tmp_path / name / "model.safetensors")).keys()
            == mx.load(str(base / "model.safetensors")).keys()
        )


def test_the_library_that_trained_the_adapter_loads_its_base(tiny_vision_checkpoint, tmp_path, monkeypatch):
    """The adapter is on the language model alone, and mlx-lm cannot load this base."""
    base = tiny_vision_checkpoint("qwen3_5_moe")
    model = load_vision_tower(base)
    convert_to_lora(model, LoraConfig(rank=2, keys=["*o_proj"]))
    save_adapters(model, tmp_path / "adapter", {"loader": "mlx-vlm"})
    monkeypatch.setattr("deltatune.models.adapted_base.load_model", None)
    assert len(merge_checkpoint(base, tmp_path / "adapter", tmp_path / "merged").changed) == 1


@pytest.mark.bad_input("experts stored one by one, of which one is missing")
def test_a_missing_expert_is_named(tiny_checkpoint, tmp_path):
    base = write_as_transformers(tiny_checkpoint("qwen3_5_moe"), tmp_path / "base")
    with rewritten(base / "model.safetensors") as tensors:
        del tensors["model.language_model.layers.1.mlp.experts.3.down_proj.weight"]
    with pytest.raises(UserError, match=r"layers.1.mlp.experts.3.down_proj.weight' is missing"):
        load_model(base)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_language_model_saved_without_its_tower(tiny_checkpoint, tmp_path, family):
    original = tiny_checkpoint(family, num_hidden_layers=3, full_attention_interval=3)
    base = write_as_text_alone(original, tmp_path / "base")
    model, config = load_model(base)
    assert equal(model, load_model(original)[0])
    assert config == json.loads((base / "config.json").read_text()) | {"rope_parameters": config["rope_parameters"]}
    assert [type(layer).__name__ for layer in new_model(base).layers] == [
        type(layer).__name__ for layer in model.layers
    ]


@pytest.mark.parametrize("family", ["kimi_linear", "olmo_hybrid", "bailing_hybrid"])
def test_names_of_transformers_own_load_and_merge_under_those_names(family, tmp_path):
    """Recorded with transformers 5.23; tests/oracle/test_replay.py trains them to transformers' own losses."""
    content = json.loads((recording.FOLDER / f"{family}.json").read_text())
    case = CASES[family].family
    weights = case.weights({name: tuple(shape) for name, shape in content["shapes"].items()})
    model, config = load_model(write_save(tmp_path / "base", content["config"], weights))
    assert config == content["config"]
    convert_to_lora(model, LoraConfig(rank=2, scale=2.0))
    # A draw that sends no token to other experts by rounding alone.
    moved(model, seed=0)
    save_adapters(model, tmp_path / "adapter", {})
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert equal(load_model(tmp_path / "merged")[0], model, 1e-4)
    stored = mx.load(str(tmp_path / "merged" / "model.safetensors"))
    assert {name: list(array.shape) for name, array in stored.items()} == content["shapes"]


def test_a_group_size_of_null_is_the_default(tiny_checkpoint, tmp_path):
    original = tiny_checkpoint("qwen3_5_moe", quantize={"bits": 3, "group_size": 64})
    settings = json.loads((original / "config.json").read_text())["quantization"]
    paths = [name for name, m in load_model(original)[0].named_modules() if getattr(m, "bits", 0) == 3]
    settings |= {path: {"group_size": None, "bits": 3, "mode": "affine"} for path in paths}
    base = copied(original, tmp_path / "base", quantization=settings, quantization_config=settings)
    model, explicit = load_model(base)[0], load_model(original)[0]
    assert equal(model, explicit)
    for each in (model, explicit):
        mx.random.seed(0)
        convert_to_lora(each, LoraConfig(rank=2, scale=2.0))
        save_adapters(each, tmp_path / "adapter", {})
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "merged", dequantize=True)
    assert equal(load_model(tmp_path / "merged")[0], explicit)
