"""The parameters that a conversion makes trainable, its report, and merging the adapters again."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from deltatune.errors import UserError
from deltatune.lora import adapters, convert_to_lora, merge
from deltatune.options.config import LoraConfig

TOKENS = mx.array([[5, 6, 7]])


def trained(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.trainable_parameters()))


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3_5_moe", "lora"), ("kimi_k3", "dora"), ("bailing", "lora"), ("gemma3_text", "dora")]
)
def test_only_adapters_train_and_the_model_starts_as_it_was(tiny_model, family, kind):
    model = tiny_model(family)
    before = model(TOKENS)
    model.train()
    report = convert_to_lora(model, LoraConfig(rank=4), fine_tune_type=kind)
    leaves = {"lora_a", "lora_b"} | ({"m"} if kind == "dora" else set())
    assert set(trained(model)) == {f"{path}.{leaf}" for path in report.converted for leaf in leaves}
    assert all(value.dtype == mx.float32 for value in trained(model).values())
    assert mx.allclose(model(TOKENS), before, atol=1e-5)
    assert all(adapter.training for adapter in adapters(model).values())


EXPERTS = ["*.switch_mlp.*"]


@pytest.mark.parametrize(
    ("family", "options", "kind", "message"),
    [
        ("qwen3", {"rank": 65}, "lora", "rank: 65 is above every chosen matrix; the largest, .* has rank 64 at most"),
        ("qwen3", {"dropout": 1.0}, "lora", "dropout: expected a number from 0 to below 1, got 1.0"),
        ("qwen3", {}, "lra", "fine_tune_type: 'lra' is not known"),
        (
            "qwen3_5_moe",
            {"rank": 65, "keys": EXPERTS},
            "lora",
            r"rank: 65 is above .* the largest, .*switch_mlp\.\w+, has rank 64 at most",
        ),
    ],
)
def test_options_that_do_not_fit(tiny_model, family, options, kind, message):
    with pytest.raises(UserError, match=message):
        convert_to_lora(tiny_model(family), LoraConfig(**options), fine_tune_type=kind)


def test_full_trains_the_last_layers_but_no_router_bias(tiny_model):
    model = tiny_model("kimi_linear")
    report = convert_to_lora(model, LoraConfig(), fine_tune_type="full", num_layers=2)
    assert report.converted == ["model.layers.2", "model.layers.3"]
    names = {
        name for name, _ in tree_flatten(model.parameters()) if name.startswith(("model.layers.2", "model.layers.3"))
    }
    assert set(trained(model)) == {name for name in names if not name.endswith("e_score_correction_bias")}


def test_full_leaves_quantised_weights_frozen_and_says_so(tiny_checkpoint):
    from deltatune.models.load import load_model

    model, _ = load_model(tiny_checkpoint("qwen3_5_moe", quantize={}))
    report = convert_to_lora(model, LoraConfig(keys=["*.q_proj"]), fine_tune_type="full")
    assert report.skipped["language_model.model.layers.3.self_attn.q_proj"] == "quantised weights have no gradient"
    assert all(mx.issubdtype(value.dtype, mx.floating) for value in trained(model).values())


def test_a_quantised_module_of_a_tower_is_named_and_said_not_to_train():
    model = nn.Module()
    model.layers, model.vision_tower = [nn.Linear(4, 4)], nn.Module()
    model.vision_tower.norm, model.vision_tower.proj = nn.LayerNorm(64), nn.QuantizedLinear(64, 8)
    report = convert_to_lora(model, LoraConfig(), fine_tune_type="full", parts=["vision"])
    assert report.converted == ["vision_tower.norm"]
    assert report.skipped == {"vision_tower.proj": "quantised weights have no gradient"}


def test_dora_on_odd_widths_notes_that_mlx_lm_cannot_load_it(tiny_checkpoint):
    from deltatune.models.load import load_model

    model, _ = load_model(tiny_checkpoint("qwen3_5", quantize={"bits": 3}))
    report = convert_to_lora(model, LoraConfig(), fine_tune_type="dora")
    assert "mlx-lm cannot load DoRA on 31 modules of 3, 5 or 6 bits" in report.notes[0]


def test_a_layers_own_to_lora_is_respected(other_model):
    """mlx-lm's afm7 has queries, keys and values in one module, which makes an adapter of its own kind."""
    sizes = {"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "num_kv_reuse_layers": 1}
    model = other_model("afm7", vocab_size=64, **sizes)
    before = model(TOKENS)
    report = convert_to_lora(model, LoraConfig(rank=2))
    path = "model.layers.0.self_attn.qkv_proj"
    assert path in report.converted
    attention = model.layers[0].self_attn
    assert [type(attention[name]).__name__ for name in ("qkv_proj", "out_proj")] == ["FusedLoRALinear", "LoRALinear"]
    assert mx.allclose(model(TOKENS), before, atol=1e-6)
    factors = {f"{path}.{leaf}.{i}" for leaf in ("lora_a", "lora_b") for i in range(3)}
    assert {name for name in trained(model) if "qkv" in name} == factors


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merge_in_place(tiny_model, kind):
    model = tiny_model("qwen3_5_moe")
    convert_to_lora(model, LoraConfig(rank=4), fine_tune_type=kind)
    for adapter in adapters(model).values():
        adapter.lora_b = 0.1 * mx.random.normal(adapter.lora_b.shape)
    before = model(TOKENS)
    merged = merge(model)
    assert len(merged) == (51 if kind == "lora" else 39)
    assert not adapters(model)
    assert mx.allclose(model(TOKENS), before, atol=1e-4)


def test_the_summary_has_one_line_for_the_same_module_of_all_layers(tiny_model):
    model = tiny_model("kimi_linear")
    lines = convert_to_lora(model, LoraConfig(keys=["self_attn.*"])).summary()
    assert len(lines) == len(set(lines)) == 5
    assert lines[0] == (
        "Note: model.layers.*.self_attn.q_conv.conv (3 of them) stays as it is: it is a Conv1d, and adapters go on "
        "linear layers, embeddings and experts."
    )
    assert any(
        line.startswith("Note: model.layers.*.self_attn.embed_q stays as it is: it is a Multi") for line in lines
    )
