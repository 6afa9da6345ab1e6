"""A split model gives the model's logits, and the same gradients to the parameters of both parts."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from deltatune.models.head import split_head
from deltatune.ops.cross_entropy import linear_cross_entropy
from families import weekly_but

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear", "olmo_hybrid", "bailing", "kimi_k3", "qwen3")


def whole(model: nn.Module, tokens: mx.array) -> mx.array:
    logits = model(tokens[:, :-1])
    return nn.losses.cross_entropy(logits, tokens[:, 1:]).sum()


def check(model: nn.Module) -> None:
    """Assert that loss and gradients through split_head and the chunked loss are those of the whole model."""
    split = split_head(model)
    assert split.reason is None
    tokens = mx.random.randint(0, 60, (2, 9), key=mx.random.key(3))
    assert mx.array_equal(split.head(split.backbone(tokens)), model(tokens))

    def in_parts(model: nn.Module, tokens: mx.array) -> mx.array:
        hidden = split.backbone(tokens[:, :-1])
        return linear_cross_entropy(split.head, hidden, tokens[:, 1:], mx.ones((2, 8)), chunk_tokens=5)[0]

    expected_loss, expected = nn.value_and_grad(model, whole)(model, tokens)
    loss, actual = nn.value_and_grad(model, in_parts)(model, tokens)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    for (name, one), (_, other) in zip(tree_flatten(expected), tree_flatten(actual), strict=True):
        largest = mx.abs(one).max().item()
        assert mx.abs(one - other).max().item() <= 1e-3 * largest + 1e-6, name


# A family says where its head is, tied or not.
@pytest.mark.parametrize(("family", "tied"), [(family, at % 2 == 0) for at, family in enumerate(FAMILIES)])
def test_families(tiny_model, family, tied):
    check(tiny_model(family, tie_word_embeddings=tied))


OTHERS = ("gemma2", "cohere", "granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2", "plamo2", "minicpm", "gpt2")


@pytest.mark.parametrize("family", weekly_but(OTHERS, "gemma2", "granitemoehybrid", "minicpm", "gpt2"))
def test_soft_caps_and_multipliers_stay_with_the_head(other_model, family):
    check(other_model(family))


def test_frozen_and_quantised_models_with_an_adapter_on_the_head(tiny_model):
    from mlx_lm.tuner.lora import LoRALinear

    model = tiny_model("qwen3_5", tie_word_embeddings=False)
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, m: isinstance(m, nn.Linear | nn.Embedding))
    model.freeze()
    model.language_model.lm_head = LoRALinear.from_base(model.language_model.lm_head, r=2)
    model.language_model.lm_head.lora_b = mx.random.normal((2, 320))
    split = split_head(model)
    names = [name.rpartition(".")[2] for name, _ in tree_flatten(split.head.trainable_parameters())]
    assert sorted(names) == ["lora_a", "lora_b"]
    check(model)


def test_head_that_cannot_be_split_has_a_reason(tiny_model):
    model = tiny_model("qwen3")

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model
            self.scale = mx.array(2.0)

        @property
        def layers(self):
            return self.inner.layers

        def __call__(self, tokens):
            return self.inner(tokens) * self.scale

    split = split_head(Wrapped())
    assert split.backbone is None
    assert split.head is None
    assert "`scale` is not a module" in split.reason
