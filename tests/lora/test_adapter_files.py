"""Saving and loading adapters: mlx-lm reads ours, we read mlx-lm's, and errors name the tensors that do not fit."""

import json
import os
import re

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten

from console import called
from deltatune.demo.assets import MODEL
from deltatune.errors import UserError
from deltatune.lora import adapters, convert_to_lora, load_adapter_weights, load_adapters, save_adapters
from deltatune.lora.adapter_files import adapter_state
from deltatune.lora.convert import install_adapters, make_adapters
from deltatune.machine import backend
from deltatune.models.load import load_model
from deltatune.options.config import LoraConfig
from families import FAMILIES
from last_place import assert_same
from saved_adapters import adapted, moved

TOKENS = mx.array([[5, 6, 7, 8]])


def difference(a: mx.array, b: mx.array) -> float:
    return mx.abs(a - b).max().item()


def test_a_model_that_skips_the_constructor_of_its_base_class_takes_its_adapter(other_model, tmp_path):
    """mlx-lm's recurrent_gemma: its modules cannot be frozen as they are made."""
    first, second = other_model("recurrent_gemma"), other_model("recurrent_gemma")
    assert not hasattr(second, "_no_grad")
    second.update(first.parameters())
    convert_to_lora(first, LoraConfig(rank=2, scale=2.0, keys=["*.mlp_block.*"]))
    save_adapters(moved(first), tmp_path, {})
    load_adapters(second, tmp_path)
    assert mx.array_equal(second(TOKENS), first(TOKENS))


KINDS = ("lora", "dora", "full")
# Each family with one kind, by turns on dense and on packed weights, so that each pair of the last two occurs: a family
# says where its modules are, and a kind what is written of one, packed or not.
FORMS = [(family, KINDS[row % 3], row % 2 == 1) for row, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(("family", "kind", "packed"), FORMS)
def test_mlx_lm_and_deltatune_load_our_adapter_alike(tiny_checkpoint, tmp_path, family, kind, packed):
    if packed and backend.device() == "cuda":
        pytest.skip("MLX's CUDA products of packed rows of one group are wrong (docs/decisions/upstream.md)")
    path = tiny_checkpoint(family, quantize={} if packed else None)
    model = adapted(path, kind=kind)
    expected = model(TOKENS)
    save_adapters(model, tmp_path, {"model": str(path), "learning_rate": 1e-4, "num_layers": -1})
    theirs, _ = mlx_lm.utils.load(str(path), adapter_path=str(tmp_path))
    assert_same(theirs(TOKENS), model, lambda: model(TOKENS))
    assert difference(load_model(path)[0](TOKENS), expected) > 0.1
    ours, _ = load_model(path)
    load_adapters(ours, tmp_path)
    assert mx.array_equal(ours(TOKENS), expected)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == kind
    assert config["learning_rate"] == 1e-4
    if kind != "full":
        assert config["lora_parameters"]["keys"] == list(adapters(model))
        assert set(dict(tree_flatten(ours.trainable_parameters()))) == set(
            dict(tree_flatten(model.trainable_parameters()))
        )


@pytest.mark.parametrize(
    ("family", "kind", "keys"),
    [
        ("qwen3_5", "dora", None),
        ("qwen3_5_moe", "lora", ["mlp.down_proj", "linear_attn.out_proj", "mlp.switch_mlp.up_proj"]),
    ],
)
def test_deltatune_loads_adapters_of_mlx_lm(tiny_checkpoint, tmp_path, family, kind, keys):
    from mlx_lm.tuner.utils import linear_to_lora_layers

    path = tiny_checkpoint(family)
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.1} | ({"keys": keys} if keys else {})
    theirs, _ = mlx_lm.utils.load_model(path)
    mx.random.seed(2)
    theirs.freeze()
    linear_to_lora_layers(theirs, 2, parameters, use_dora=kind == "dora")
    moved(theirs)
    theirs.eval()
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    mlx_lm.utils.save_config(config | {"model": str(path)}, tmp_path / "adapter_config.json")
    weights = dict(tree_flatten(theirs.trainable_parameters()))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
    ours, _ = load_model(path)
    load_adapters(ours, tmp_path)
    assert_same(ours(TOKENS), theirs, lambda: theirs(TOKENS))
    assert set(dict(tree_flatten(ours.trainable_parameters()))) == set(weights)
    assert {round(adapter.dropout_rate, 6) for adapter in adapters(ours).values()} == {0.1}


def test_unequal_ranks_and_scales_become_one(tiny_checkpoint, tmp_path):
    path = tiny_checkpoint("qwen3_5_moe")
    model, _ = load_model(path)
    layer = "language_model.model.layers.3"
    made = make_adapters(model, {f"{layer}.self_attn.q_proj": 2, f"{layer}.mlp.switch_mlp.up_proj": 3}, 2.0, 0.0)
    made |= make_adapters(model, {f"{layer}.mlp.switch_mlp.down_proj": 5, f"{layer}.self_attn.o_proj": 1}, 8.0, 0.0)
    install_adapters(model, made)
    moved(model)
    save_adapters(model, tmp_path, {})
    theirs, _ = mlx_lm.utils.load(str(path), adapter_path=str(tmp_path))
    assert_same(theirs(TOKENS), model, lambda: model(TOKENS), 1e-5)
    ours, _ = load_model(path)
    load_adapters(ours, tmp_path)
    assert {adapter.rank for adapter in adapters(ours).values()} == {1, 2, 3, 5}
    assert_same(ours(TOKENS), model, lambda: model(TOKENS), 1e-5)


def test_training_that_the_format_cannot_express_is_refused_by_name(tiny_checkpoint):
    path = tiny_checkpoint("qwen3_5")
    layer = "language_model.model.layers.3"

    def model_with_second_adapter(dropout: float = 0.0, dora: bool = False) -> nn.Module:
        model, _ = load_model(path)
        made = make_adapters(model, {f"{layer}.self_attn.q_proj": 2}, 2.0, 0.0)
        made |= make_adapters(model, {f"{layer}.mlp.up_proj": 2}, 2.0, dropout, dora=dora)
        install_adapters(model, made)
        return model

    with pytest.raises(UserError, match=r"LoRA \(.*q_proj\) and DoRA \(.*up_proj\) in one adapter"):
        adapter_state(model_with_second_adapter(dora=True))
    with pytest.raises(UserError, match=r"up_proj differ in dropout"):
        adapter_state(model_with_second_adapter(dropout=0.5))
    model = model_with_second_adapter()
    model.language_model.model.norm.unfreeze()
    with pytest.raises(UserError, match=r"language_model.model.norm.weight is trained beside adapters"):
        adapter_state(model)


def test_adapter_of_another_model(tiny_checkpoint, tmp_path):
    adapted(tiny_checkpoint("qwen3_5"), tmp_path / "hybrid")
    other, _ = load_model(tiny_checkpoint("qwen3"))
    with pytest.raises(
        UserError, match=r"62 of its 62 tensors do not fit: language_model\..* no module .* and 59 more"
    ):
        load_adapters(other, tmp_path / "hybrid")
    wider, _ = load_model(tiny_checkpoint("qwen3_5", intermediate_size=192))
    with pytest.raises(UserError, match=r"mlp\.\w+\.lora_\w has shape \(\d+, \d+\), the model's is \(\d+, \d+\)"):
        load_adapters(wider, tmp_path / "hybrid")
    assert not adapters(wider)
    with pytest.raises(ValueError, match="already carries adapters"):
        load_adapters(adapted(tiny_checkpoint("qwen3_5")), tmp_path / "hybrid")
    adapted(tiny_checkpoint("qwen3_5"), tmp_path / "full", "full")
    with pytest.raises(UserError, match=r"is for another model: .* the model has no language_model"):
        load_adapters(other, tmp_path / "full")


ADAPTER = {
    "PEFT's for MLX's": (
        "generate --prompt a --adapter-path peft",
        "peft: this is PEFT's; .* deltatune import --peft peft",
    ),
    "a file for its folder": (
        "generate --prompt a --adapter-path mlx/a.safetensors",
        "this is a file; give its folder, mlx",
    ),
    "a folder for its file": (
        "train --data d --resume-adapter-file mlx",
        "it is a folder; give mlx/adapters.safetensors",
    ),
    "PEFT's folder for MLX's file": ("train --data d --resume-adapter-file peft", "this is PEFT's; write it as MLX's"),
    "an adapter for a model": ("generate --prompt a --model mlx", "it holds an adapter; give it as --adapter-path"),
    "MLX's for PEFT's": ("import --save-path new --peft mlx", "not an adapter of PEFT. MLX's needs no import"),
    "a file for PEFT's folder": (
        "import --save-path new --peft mlx/a.safetensors",
        "this is a file; give its folder, mlx",
    ),
}


@pytest.mark.bad_input("an adapter: {what}")
@pytest.mark.parametrize("what", ADAPTER)
def test_an_adapter_of_another_kind_is_answered_with_the_right_one(tmp_path, what):
    for folder, content in {"mlx": {"fine_tune_type": "lora"}, "peft": {"peft_type": "LORA"}}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_config.json").write_text(json.dumps(content))
        (tmp_path / folder / "a.safetensors").touch()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.jsonl").write_text('{"text": "a"}\n' * 4)
    words, message = ADAPTER[what]
    command, *flags = words.split()
    done = called(command, *(() if "--model" in flags else ("--model", MODEL)), *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert re.search(message, done.stderr)


def test_damaged_adapters(tiny_checkpoint, tmp_path):
    path = tiny_checkpoint("qwen3")
    folder = tmp_path / "adapter"

    def refused(match: str) -> None:
        model, _ = load_model(path)
        with pytest.raises(UserError, match=match) as caught:
            load_adapters(model, folder)
        assert "\n" not in str(caught.value)

    refused("no such directory")
    folder.mkdir()
    refused("no adapter_config.json in it")
    adapted(path, folder)
    weights, config = folder / "adapters.safetensors", folder / "adapter_config.json"
    content, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(content[:-10])
    refused("cut short")
    weights.unlink()
    refused("adapters.safetensors: no such file")
    mx.save_safetensors(str(weights), {"model.norm.weight": mx.zeros((2,))})
    refused("model.norm.weight is no adapter tensor")
    tensors = {"model.layers.0.mlp.up_proj.lora_a": mx.zeros((64, 4))}
    mx.save_safetensors(str(weights), tensors)
    refused("model.layers.0.mlp.up_proj.lora_b is missing")
    mx.save_safetensors(str(weights), {"model.layers.0.mlp.lora_a": mx.zeros((64, 4))})
    refused("and adapters go on linear layers, embeddings and experts")
    mx.save_safetensors(str(weights), {"model.layers.0.mlp.weight.new_rows": mx.zeros((1, 64))})
    config.write_text(json.dumps(json.loads(text) | {"new_rows_from": 5}))
    refused("model.layers.0.mlp: rows for new tokens cannot be added to this MLP")
    weights.write_bytes(content)
    config.write_text("{")
    refused("adapter_config.json: not JSON")
    config.write_text("[]")
    refused("expected a JSON object")
    config.write_text(json.dumps(json.loads(text) | {"fine_tune_type": "prefix"}))
    refused("fine_tune_type 'prefix' is not known")
    config.write_text(json.dumps(json.loads(text) | {"lora_parameters": {"alpha": 8}}))
    refused("with a number `scale` expected")


def test_output_that_cannot_be_written(tiny_checkpoint, tmp_path):
    model = adapted(tiny_checkpoint("qwen3"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the adapter cannot be written"):
        save_adapters(model, tmp_path / "file" / "adapter", {})


def test_an_interrupted_save_leaves_the_previous_adapter(tiny_checkpoint, tmp_path, monkeypatch):
    model = adapted(tiny_checkpoint("qwen3"))
    file = save_adapters(model, tmp_path, {})
    before = file.read_bytes()

    def full(descriptor):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        save_adapters(moved(model, seed=5), tmp_path, {})
    assert file.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["adapter_config.json", "adapters.safetensors"]


@pytest.mark.bad_input("--resume-adapter-file whose adapter_config.json has another scale, rank or kind than the run")
@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("lora", {"scale": 10.0}, r"says scale 10\.0, and the adapters of this run have scale 2\.0"),
        ("lora", {"rank": 4}, "says rank 4, and the adapters of this run have rank 16"),
        ("dora", {}, "says fine_tune_type 'dora', and the adapters of this run have fine_tune_type 'lora'"),
    ],
)
def test_a_saved_file_is_compared_with_its_config(tiny_checkpoint, tmp_path, kind, options, said):
    path = tiny_checkpoint("qwen3_5")
    saved, own = load_model(path)[0], load_model(path)[0]
    convert_to_lora(saved, LoraConfig(**options), fine_tune_type=kind)
    file = save_adapters(saved, tmp_path, {})
    convert_to_lora(own, LoraConfig())
    with pytest.raises(UserError, match=said):
        load_adapter_weights(own, file)
    same = load_model(path)[0]
    convert_to_lora(same, LoraConfig(**options), fine_tune_type=kind)
    load_adapter_weights(same, file)
