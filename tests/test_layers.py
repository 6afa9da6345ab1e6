"""Layers told apart by structure: gated delta, attention, Mamba, experts."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from deltatune.errors import UserError
from deltatune.layers import describe, gated_delta_layers, logits_of

DELTA = ["delta", "delta", "delta", "attention"]


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("qwen3_5", [False] * 4),
        ("qwen3_5_moe", [True] * 4),
        ("qwen3_next", [True] * 4),
        ("kimi_linear", [False, True, True, True]),
        ("olmo_hybrid", [False] * 4),
        ("bailing", [False, True, True, True]),
        ("kimi_k3", [False, True, True, True]),
    ],
)
def test_gated_delta_families(tiny_model, family, experts):
    model = tiny_model(family)
    layers = describe(model)
    assert [layer.kind for layer in layers] == DELTA
    assert [layer.experts for layer in layers] == experts
    assert [layer.index for layer in layers] == [0, 1, 2, 3]
    modules = dict(model.named_modules())
    assert all(modules[layer.path] is layer.module for layer in layers)
    assert [layer.delta for layer in layers[:3]] == sorted(gated_delta_layers(model))
    assert layers[3].delta is None


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("mamba", ["mamba", "mamba"]),
        ("mamba2", ["mamba", "mamba"]),
        ("nemotron_h", ["mamba", "attention", "other"]),
        ("falcon_h1", ["mamba", "mamba"]),
        ("jamba", ["mamba", "attention"]),
        ("granitemoehybrid", ["mamba", "attention"]),
        ("plamo2", ["mamba", "attention"]),
        ("gemma2", ["attention", "attention"]),
        ("gpt2", ["attention", "attention"]),
    ],
)
def test_mamba_is_not_gated_delta(other_model, family, kinds):
    model = other_model(family)
    assert [layer.kind for layer in describe(model)] == kinds
    assert gated_delta_layers(model) == {}


def test_a_subclass_elsewhere_is_found_through_its_base(tiny_model):
    model = tiny_model("qwen3_5")
    layer = model.layers[0].linear_attn
    layer.__class__ = type("Renamed", (type(layer),), {"__module__": "somewhere"})
    assert len(gated_delta_layers(model)) == 3


def test_no_layers_is_the_users_mistake():
    with pytest.raises(UserError, match="layers"):
        describe(nn.Linear(2, 2))


def test_text_goes_through_models_that_require_pictures_and_answer_with_an_object():
    class Seeing(nn.Module):
        def __call__(self, tokens, pixel_values, mask=None, **more):
            assert (pixel_values, mask) == (more.get("pictures"), None)
            return SimpleNamespace(logits=mx.ones((*tokens.shape, 7)))

    tokens = mx.zeros((2, 3), mx.int32)
    assert logits_of(Seeing(), tokens).shape == (2, 3, 7)
    assert logits_of(Seeing(), tokens, pixel_values=1, pictures=1).shape == (2, 3, 7)
    assert logits_of(nn.Embedding(5, 4), tokens).shape == (2, 3, 4)
