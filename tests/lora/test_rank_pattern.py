"""Ranks by pattern: which module gets which, and that results and files are those of adapters of these ranks."""

import json

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten

from deltatune import patched
from deltatune.cli import main
from deltatune.errors import UserError
from deltatune.lora import adapters, convert_to_lora, load_adapter_weights, load_adapters, save_adapters
from deltatune.models.load import load_model
from deltatune.options.config import LoraConfig
from saved_adapters import moved

TOKENS = mx.array([[5, 6, 7, 8]])
# A whole path, a path in a layer, a name; all three of an expert layer's matrices differ.
PATTERNS = {
    "language_model.model.layers.3.self_attn.q_proj": 7,
    "mlp.switch_mlp.gate_proj": 2,
    "mlp.switch_mlp.*": 3,
    "k_proj": 1,
    "*.shared_expert.*": 5,
}


def converted(model: nn.Module, **options) -> nn.Module:
    convert_to_lora(model, LoraConfig(**{"rank": 6, "scale": 2.0, "rank_pattern": PATTERNS} | options))
    return moved(model)


@pytest.fixture
def saved(tiny_checkpoint, tmp_path):
    """A mixture's checkpoint, the folder with its adapter, and the adapted model."""
    path = tiny_checkpoint("qwen3_5_moe")
    model = converted(load_model(path)[0])
    save_adapters(model, tmp_path / "adapter", {})
    return path, tmp_path / "adapter", model


def ranks(model: nn.Module) -> dict[str, int]:
    return {path.rpartition("language_model.model.")[2]: adapter.rank for path, adapter in adapters(model).items()}


def test_the_first_pattern_that_matches_sets_the_rank(tiny_model):
    model = tiny_model("qwen3_5_moe", num_hidden_layers=8)
    found = ranks(converted(model, rank_pattern={**PATTERNS, "q_proj": 2}))
    assert found["layers.3.self_attn.q_proj"] == 7
    assert found["layers.7.self_attn.q_proj"] == 2
    assert found["layers.7.self_attn.k_proj"] == 1
    assert found["layers.3.self_attn.v_proj"] == 6
    of_experts = {name: found[f"layers.0.mlp.switch_mlp.{name}_proj"] for name in ("gate", "up", "down")}
    assert of_experts == {"gate": 2, "up": 3, "down": 3}


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({"scale": 3.0}, {2: 3.0, 8: 3.0}),
        ({"scale": 4.0, "rslora": True}, {4: 2.0, 16: 1.0}),
        # As in PEFT, alpha is divided by the module's own rank.
        ({"alpha": 16.0}, {2: 8.0, 8: 2.0}),
        ({"alpha": 8.0, "rslora": True}, {4: 4.0, 16: 2.0}),
    ],
)
def test_scales_of_two_ranks(tiny_model, options, scales):
    low, high = scales
    model = tiny_model("qwen3")
    convert_to_lora(model, LoraConfig(rank=high, rank_pattern={"q_proj": low}, **options))
    assert {adapter.rank: adapter.scale for adapter in adapters(model).values()} == scales


def test_gradients_equal_those_of_one_rank_with_zero_rows(saved):
    """Such adapters are saved; mlx-lm loads them with one rank."""
    path, folder, model = saved
    padded = mlx_lm.utils.load(str(path), adapter_path=str(folder))[0]
    padded.freeze()
    for adapter in adapters(padded).values():
        adapter.unfreeze(recurse=False, keys=["lora_a", "lora_b"])
    tokens = mx.random.randint(0, 320, (2, 40), key=mx.random.key(3))

    def gradients(model: nn.Module) -> dict[str, mx.array]:
        model.train()
        with patched(model):

            def loss(parameters):
                model.update(parameters)
                return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

            return dict(tree_flatten(mx.grad(loss)(model.trainable_parameters())))

    found, expected = gradients(model), gradients(padded)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        part = expected[name][tuple(slice(size) for size in gradient.shape)]
        assert mx.allclose(gradient, part, rtol=1e-3, atol=1e-6), name
        assert mx.any(gradient != 0), name


def test_a_run_starts_from_such_adapters_with_their_ranks_alone(saved):
    path, folder, model = saved
    other = converted(load_model(path)[0])
    load_adapter_weights(other, folder / "adapters.safetensors")
    assert mx.array_equal(other(TOKENS), model(TOKENS))
    lower = converted(load_model(path)[0], rank_pattern=PATTERNS | {"mlp.switch_mlp.*": 2})
    # Without the config beside it, the tensors alone say that the file does not fit.
    (folder / "adapter_config.json").unlink()
    with pytest.raises(UserError, match=r"_proj.lora_. has shape \(8, .*7.*\), the model's is \(8, .*2.*\)"):
        load_adapter_weights(lower, folder / "adapters.safetensors")


def test_ranks_go_to_peft_and_back(saved, tmp_path):
    path, folder, model = saved
    words = ["--model", str(path), "--save-path"]
    assert main(["export", "--to", "peft", "--adapter-path", str(folder), *words, str(tmp_path / "peft")]) == 0
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["rank_pattern"]["shared_expert.up_proj"] == 5
    # Gate and up are one parameter there.
    patterns = {name: rank for name, rank in config["rank_pattern"].items() if "experts" in name}
    assert patterns == {"experts.gate_up_proj": 5, "experts.down_proj": 3}
    assert config["rank_pattern"].keys() == config["alpha_pattern"].keys()
    assert main(["import", "--peft", str(tmp_path / "peft"), *words, str(tmp_path / "back")]) == 0
    back = load_model(path)[0]
    load_adapters(back, tmp_path / "back")
    assert mx.abs(back(TOKENS) - model(TOKENS)).max().item() < 1e-5
    found = {name: rank for name, rank in ranks(back).items() if "switch_mlp" not in name}
    assert found == {name: rank for name, rank in ranks(model).items() if "switch_mlp" not in name}


@pytest.mark.bad_input("`rank_pattern` that matches nothing, nothing with an adapter, or nothing that is left")
@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ({"mlp.expert.*": 2}, r"'mlp.expert.\*' matches no module \(nearest: mlp.switch_mlp.\*"),
        ({"embed_tokens": 2}, "'embed_tokens' matches only modules that get no adapter, such as language_model.model."),
        ({"mlp.*": 2, "mlp.switch_mlp.*": 3}, "sets no rank, since earlier patterns match all of its modules"),
        ({"mlp.switch_mlp.*": 65}, "rank_pattern: 65 is above every chosen matrix"),
        ({"q_proj": 0}, "'q_proj': expected a whole number of 1 or more, got 0"),
        ({"q_proj": 1.5}, "'q_proj': expected a whole number of 1 or more, got 1.5"),
        ([4], "rank_pattern: expected a mapping"),
    ],
)
def test_patterns_that_set_no_rank_are_refused(tiny_model, patterns, said):
    with pytest.raises(UserError, match=said):
        convert_to_lora(tiny_model("qwen3_5_moe"), LoraConfig(rank_pattern=patterns))


class AdaptedByMlxLm(nn.Linear):
    """A layer that makes its own adapter, as those of mlx-lm's afm7."""

    def to_lora(self, r: int, scale: float, dropout: float) -> nn.Module:
        raise AssertionError("it is refused before")


def test_a_module_that_mlx_lm_adapts_itself_keeps_the_highest_rank(tiny_model):
    model = tiny_model("qwen3")
    model.layers[0].self_attn.q_proj = AdaptedByMlxLm(64, 64)
    with pytest.raises(UserError, match="mlx-lm adapts itself and cannot save with another rank than the highest"):
        convert_to_lora(model, LoraConfig(rank=4, rank_pattern={"q_proj": 2}))
