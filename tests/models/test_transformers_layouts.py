"""Checkpoints as transformers 5 saves them load with the logits of the same model in MLX's form."""

import json

import mlx.core as mx
import pytest

from checkpoint_copies import copied, rewritten
from deltatune.errors import UserError
from deltatune.layers import logits_of
from deltatune.lora import convert_to_lora, save_adapters
from deltatune.models.load import load_model, load_vision_tower, new_model
from deltatune.models.merged_checkpoint import merge_checkpoint
from deltatune.options.config import LoraConfig
from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import CASES
from deltatune.selftest.parity.ours import write_save
from saved_adapters import moved
from transformers_saves import write_as_text_alone, write_as_transformers

TOKENS = mx.array([[5, 6, 7, 8, 9]])


def equal(model, other, most=1e-5):
    return mx.abs(logits_of(model, TOKENS) - logits_of(other, TOKENS)).max().item() < most


def test_one_tensor_an_expert_loads_through_both_libraries_and_merges_through_both(tiny_vision_checkpoint, tmp_path):
    original = tiny_vision_checkpoint("qwen3_5_moe")
    base = write_as_transformers(original, tmp_path / "base")
    for name, load in (("text", lambda path: load_model(path)[0]), ("images", load_vision_tower)):
        model = load(base)
        assert equal(model, load(original))
        convert_to_lora(model, LoraConfig(rank=2, scale=2.0, keys=["*switch_mlp.up_proj", "*o_proj"]))
        moved(model)
        loader = "mlx-lm" if name == "text" else "mlx-vlm"
        save_adapters(model, tmp_path / f"{name}_adapter", {"model": str(base), "loader": loader})
        done = merge_checkpoint(base, tmp_path / f"{name}_adapter", tmp_path / name)
        assert len(done.changed) == 4 * 8 + 1
        assert equal(load(tmp_path / name), model)
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
