"""Which modules get an adapter, and the messages for a choice that does not fit the model."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from deltatune.errors import UserError
from deltatune.layers import layer_kind, layer_paths
from deltatune.lora import convert_to_lora
from deltatune.lora.new_rows import directly_read
from deltatune.lora.select import _ModuleNames, select
from deltatune.options.config import LoraConfig
from families import FAMILIES

TOKENS = mx.array([[5, 6, 7]])


def chosen(model: nn.Module, num_layers: int = -1, dora: bool = False, **options) -> list[str]:
    return list(select(model, LoraConfig(**options), num_layers=num_layers, dora=dora).targets)


def refused(match: str, model: nn.Module, num_layers: int = -1, dora: bool = False, **options) -> None:
    with pytest.raises(UserError, match=match) as caught:
        select(model, LoraConfig(**options), num_layers=num_layers, dora=dora)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_of_layers(tiny_model, family):
    others = "attention" if family in ("qwen3", "gemma3_text") else "delta"
    assert [layer_kind(layer) for layer in tiny_model(family).layers] == [*[others] * 3, "attention"]


@pytest.mark.parametrize("family", FAMILIES)
def test_default_is_every_linear_and_expert_of_the_layers_as_in_mlx_lm(tiny_model, family):
    from mlx_lm.models.switch_layers import SwitchLinear

    model = tiny_model(family)
    paths = layer_paths(model)
    modules = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | SwitchLinear) and path.startswith(tuple(f"{layer}." for layer in paths))
    }
    found = select(model, LoraConfig())
    read = {path for path in found.skipped if "read directly" in found.skipped[path]}
    assert set(found.targets) | read == set(modules)
    assert read == {path for path in modules if "_res_proj" in path}
    assert all(isinstance(reason, str) for reason in found.skipped.values())


def test_modules_with_a_directly_read_weight_are_reported(tiny_model):
    skipped = select(tiny_model("kimi_k3"), LoraConfig()).skipped
    prefix = "language_model.model.layers.3"
    assert "weight is read directly by its owner" in skipped[f"{prefix}.self_attention_res_proj"]
    assert "weight is read directly by its owner" in skipped[f"{prefix}.mlp_res_proj"]
    assert "MultiLinear" in skipped[f"{prefix}.self_attn.embed_q"]
    # Convolutions are left alone without a word, since nobody named them.
    assert not any("Conv1d" in reason for reason in skipped.values())


def test_reads_by_alias_item_and_helper_are_found_and_the_model_stays_as_it_was():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            for name in ("called", "aliased", "item", "helped", "tested", "tied", "evaluated"):
                self[name] = nn.Linear(4, 4)
            self.tied = nn.Embedding(10, 4)
            self.dropped = nn.Dropout(0.5)
            self._cache = None

        def __call__(self, ids):
            alias = self.aliased
            x = self.called(self.dropped(self.embed(ids))) @ alias.weight @ self.item["weight"]
            x = x @ _weight_of(self.helped)
            x = x @ self.tested.weight.T if type(self.tested) is nn.Linear else self.tested(x)
            if not self.training:
                x = x + self.evaluated.bias
            self._cache = x
            return self.tied.as_linear(x)

    def _weight_of(module):
        return module.get("weight")

    model = Owner()
    model.eval()
    model.called.train()
    candidates = {path: module for path, module in model.named_modules() if "weight" in module}
    mx.random.seed(4)
    expected = mx.random.uniform()
    mx.random.seed(4)
    found = directly_read(model, candidates)
    assert mx.array_equal(mx.random.uniform(), expected)
    assert found == {"aliased": "weight", "item": "weight", "helped": "weight", "evaluated": "bias"}
    assert model._cache is None
    assert not model.training
    assert model.called.training
    assert type(model.called) is nn.Linear


def test_patterns(tiny_model):
    model = tiny_model("qwen3_5_moe")
    layers = "language_model.model.layers"
    assert chosen(model, keys=["self_attn.q_proj"]) == [f"{layers}.3.self_attn.q_proj"]
    assert chosen(model, keys=["linear_attn.out_*"]) == [f"{layers}.{i}.linear_attn.out_proj" for i in range(3)]
    assert chosen(model, keys=["*.up_proj"], exclude=["*shared*", f"{layers}.[012].*"]) == [
        f"{layers}.3.mlp.switch_mlp.up_proj"
    ]
    assert chosen(model, keys=["*.k_proj", "*.v_proj"]) == [
        f"{layers}.3.self_attn.k_proj",
        f"{layers}.3.self_attn.v_proj",
    ]
    assert chosen(model, keys=["language_model.model.embed_tokens"]) == ["language_model.model.embed_tokens"]
    # A name alone stands for all modules of this name, as in PEFT's target_modules.
    assert chosen(model, keys=["q_proj", "embed_tokens"]) == chosen(model, keys=["*.q_proj", "*.embed_tokens"])
    assert chosen(model, keys=["up_*"]) == chosen(model, keys=["*.up_proj"])
    assert not set(chosen(model, exclude=["up_proj"])) & set(chosen(model, keys=["*.up_proj"]))


def test_a_full_path_without_dots_is_no_short_name():
    """Saved adapters list full paths, such as that of the head."""
    model, layer = nn.Module(), nn.Module()
    model.layers, model.head, layer.head, layer.gate = [layer], nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    names = _ModuleNames(model, ["layers.0"])
    assert [path for path in names.modules if names.match("head", path)] == ["head"]
    assert [path for path in names.modules if names.match("gate", path)] == ["layers.0.gate"]


def test_layers_by_count_index_and_kind(tiny_model):
    model = tiny_model("qwen3_5")

    def layers(num_layers: int = -1, **options) -> list[int]:
        return sorted({int(path.split(".")[3]) for path in chosen(model, num_layers, **options)})

    assert layers() == [0, 1, 2, 3]
    assert layers(2) == [2, 3]
    assert layers(0) == [0, 1, 2, 3]  # As in mlx_lm.lora.
    assert layers(5) == [0, 1, 2, 3]
    assert layers(layers=[0, -1]) == [0, 3]
    assert layers(1, layers=[1]) == [1]
    assert layers(layer_kinds=["delta"]) == [0, 1, 2]
    assert layers(2, layer_kinds=["delta"]) == [2]
    assert layers(layer_kinds=["attention", "delta"]) == [0, 1, 2, 3]
    # A full path without wildcards selects modules of all layers, because saved adapters list their modules that way.
    path = "language_model.model.layers.0.mlp.up_proj"
    assert chosen(model, 1, keys=[path]) == [path]


def test_choices_that_do_not_fit(tiny_model):
    model = tiny_model("qwen3_5_moe")
    refused(r"keys: 'self_attn.qproj' matches no module \(nearest: .*self_attn.q_proj", model, keys=["self_attn.qproj"])
    refused(
        r"'mlp.switch_mlp.gate_prj' matches no .*nearest: .*switch_mlp.gate_proj",
        model,
        keys=["mlp.switch_mlp.gate_prj"],
    )
    refused(r"'\*.experts.\*' matches no module \(nearest: mlp.switch_mlp.\*\)", model, keys=["*.experts.*"])
    refused(r"keys: 'q_porj' matches no module \(nearest: q_proj", model, keys=["q_porj"])
    refused("exclude: 'nothing' matches no module", model, exclude=["nothing"])
    refused("leaves out", model, keys=["linear_attn.out_proj"], layers=[3])
    refused("'linear_attn.conv1d' matches nothing that takes an adapter: .*Conv1d", model, keys=["linear_attn.conv1d"])
    refused("DoRA is not defined on experts", model, keys=["*.switch_mlp.*"], dora=True)
    refused("No module is left", model, exclude=["*"])
    refused("no layer 4; the model has layers 0 to 3", model, layers=[4])
    refused("layer_kinds: entry 1: expected one of delta, .*, got 'deltas'", model, layer_kinds=["deltas"])
    refused("no layer of kind mamba .* they are attention, delta", model, layer_kinds=["mamba"])
    refused("rank: expected a whole number of 1 or more, got 0", model, rank=0)
    refused("has no `layers`", nn.Linear(2, 2))


def test_an_adapted_model_is_not_adapted_twice_in_one_place(tiny_model):
    model = tiny_model("qwen3")
    convert_to_lora(model, LoraConfig(keys=["*.q_proj"]))
    convert_to_lora(model, LoraConfig(keys=["*.v_proj"]))
    with pytest.raises(UserError, match="matches no module"):
        convert_to_lora(model, LoraConfig(keys=["self_attn.q_proj"]))
    trained = {name.rsplit(".", 2)[-2] for name, _ in tree_flatten(model.trainable_parameters())}
    assert trained == {"q_proj", "v_proj"}
