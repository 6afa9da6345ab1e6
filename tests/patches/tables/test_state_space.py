"""Mamba-2's layers and Lightning attention of mlx-lm, with deltatune's linear attention in them."""

from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from deltatune.layers import describe
from deltatune.lora import convert_to_lora
from deltatune.models.layer_caches import carries
from deltatune.ops import checkpoint
from deltatune.ops.checkpoint import checkpointed
from deltatune.ops.layer_cut import TOKENS, LayerCut
from deltatune.ops.segments import segments
from deltatune.options.config import LoraConfig
from deltatune.patches import patched, served
from deltatune.patches.tables import state_space
from deltatune.patches.whole_rows import OURS, UPSTREAM, reset
from families import LINEAR_ATTENTION
from transformers_saves import recorded_save

# Further families, of which the repository has a recorded checkpoint.
SAVED = ("falcon_h1", "bailing_moe_linear")
# The mixers of each model.
MIXERS = {"nemotron_h": 2, "mamba2": 2}


def made(name: str) -> nn.Module:
    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs(model_type=name, **LINEAR_ATTENTION[name]))
    mx.eval(model.parameters())
    return model


def gradients(model: nn.Module, tokens: mx.array) -> dict[str, mx.array]:
    """The loss, and the gradient of every parameter."""
    loss = lambda m: m(tokens).astype(mx.float32).square().mean()  # noqa: E731
    value, tree = nn.value_and_grad(model, loss)(model)
    results = {"loss": value, **dict(tree_flatten(tree))}
    mx.eval(results)
    return results


def tokens_of(*shape: int) -> mx.array:
    return mx.random.randint(1, 40, shape, key=mx.random.key(3))


@pytest.mark.parametrize("name", LINEAR_ATTENTION)
def test_every_gradient_is_upstreams(name):
    model, tokens = made(name), tokens_of(2, 70)
    expected = gradients(model, tokens)
    with patched(model) as report:
        assert list(report.serving.linear.values()) == ["chunk"] * MIXERS[name]
        reset()
        results = gradients(model, tokens)
        assert served() == {OURS: MIXERS[name]}
    for path, exact in expected.items():
        assert mx.abs(results[path] - exact).max() <= 2e-5 * mx.abs(exact).max(), path


def test_packed_documents_get_what_they_get_alone():
    model, tokens = made("nemotron_h"), tokens_of(1, 70)
    with patched(model):
        with segments(mx.array([[0] * 41 + [1] * 29], mx.int32)):
            packed = model(tokens)
        alone = mx.concatenate([model(tokens[:, :41]), model(tokens[:, 41:])], axis=1)
    assert mx.abs(packed - alone).max() <= 2e-5 * mx.abs(alone).max()


def test_mixers_carry_their_state_between_pieces():
    model = made("nemotron_h")
    layers = describe(model)
    assert [layer.kind for layer in layers] == ["mamba", "other", "mamba", "attention", "other"]
    with patched(model):
        carried = carries(model, layers)
    assert [(carry.states, carry.attends) for carry in carried] == [(2, 0), (0, 0), (2, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize(
    ("name", "packed"), [*((name, False) for name in (*LINEAR_ATTENTION, *SAVED)), *((name, True) for name in SAVED)]
)
def test_pieces_have_the_gradients_of_whole_rows(name, packed, monkeypatch, tmp_path):
    """Every layer is cut: MLP and experts too, and those with a recurrence beside their attention."""
    model = made(name) if name in LINEAR_ATTENTION else load_model(recorded_save(name, tmp_path / "saved"))[0]
    tokens = tokens_of(1, 70)
    layers = describe(model)
    # A document begins within a piece, and one where a piece begins.
    documents = mx.array([[0] * 20 + [1] * 14 + [2] * 36], mx.int32) if packed else None
    with patched(model), segments(documents):
        expected = gradients(model, tokens)
        cuts = [LayerCut(TOKENS, (0, 33, 34, 70))] * len(layers)
        monkeypatch.setattr(checkpoint, "layer_cut", lambda x: cuts.pop())
        with checkpointed([layer.module for layer in layers], carries(model, layers)):
            results = gradients(model, tokens)
    assert not cuts
    for path, exact in expected.items():
        assert mx.abs(results[path] - exact).max() <= 2e-5 * mx.abs(exact).max(), path


def test_decoding_is_upstreams():
    """The next tokens, with their cache, have the bits of upstream's code; a prompt has its numbers."""
    model, tokens = made("nemotron_h"), tokens_of(1, 20)

    def decoded() -> tuple[mx.array, list[mx.array]]:
        cache = make_prompt_cache(model)
        prompt = model(tokens[:, :17], cache=cache)
        reset()
        rows = [model(tokens[:, at : at + 1], cache=cache) for at in range(17, 20)]
        mx.eval(prompt, rows)
        return prompt, rows

    prompt, rows = decoded()
    with patched(model):
        other_prompt, other_rows = decoded()
        assert served() == {UPSTREAM: 3 * MIXERS["nemotron_h"]}
    assert mx.allclose(prompt, other_prompt, rtol=0, atol=1e-5)
    for one, other in zip(rows, other_rows, strict=True):
        assert mx.allclose(one, other, rtol=0, atol=1e-5)


def test_packed_documents_start_without_a_state():
    model, tokens = made("mamba2"), tokens_of(1, 20)
    cache = make_prompt_cache(model)
    model(tokens, cache=cache)
    with patched(model), segments(mx.zeros((1, 20), mx.int32)), pytest.raises(ValueError, match="without a state"):
        model(tokens, cache=cache)


@pytest.mark.parametrize("module", ["bailing_moe_linear", "bailing_hybrid"])
@pytest.mark.parametrize("documents", [False, True], ids=["a document", "two"])
def test_lightning_attention(module, documents):
    """Compares with upstream's loop: one document, and two that it computes one after the other."""
    upstream = import_module(f"mlx_lm.models.{module}").recurrent_gla
    ours = state_space._recurrent_gla(upstream)
    q, k, v = (mx.random.normal((2, 3, 40, size), key=mx.random.key(size)) for size in (8, 9, 6))
    k, gates = k[..., :8], mx.array([-0.3, -0.01, -0.9])

    def in_two(*arrays: mx.array) -> mx.array:
        parts = [[x[:, :, cut] for x in arrays] for cut in (slice(0, 17), slice(17, 40))]
        return mx.concatenate([upstream(*part, gates, scale=0.5)[0] for part in parts], axis=2)

    def packed(*arrays: mx.array) -> mx.array:
        with segments(mx.array([[0] * 17 + [1] * 23] * 2, mx.int32) if documents else None):
            return ours(*arrays, gates, scale=0.5)[0]

    whole = lambda *arrays: upstream(*arrays, gates, scale=0.5)[0]  # noqa: E731
    cotangent = mx.random.normal((2, 3, 40, 6), key=mx.random.key(1))
    expected, results = (mx.vjp(f, [q, k, v], [cotangent]) for f in (in_two if documents else whole, packed))
    for one, other in zip([*expected[0], *expected[1]], [*results[0], *results[1]], strict=True):
        assert mx.abs(one - other).max() <= 2e-5 * mx.abs(one).max()


# The linears of a layer of each kind in Nemotron-H's pattern; its experts are one module with an adapter for each.
ADAPTED = {
    "M": ["in_proj", "out_proj"],
    "-": ["down_proj", "up_proj"],
    "*": ["k_proj", "o_proj", "q_proj", "v_proj"],
    "E": ["shared_experts.down_proj", "shared_experts.up_proj", "switch_mlp.fc1", "switch_mlp.fc2"],
}


def test_every_linear_of_nemotrons_pattern_gets_an_adapter():
    """Usual lists of names (q_proj, k_proj, ...) miss all mixers; the default choice is by structure."""
    model = made("nemotron_h")
    convert_to_lora(model, LoraConfig(rank=2))
    trained = {path.rpartition(".")[0] for path, _ in tree_flatten(model.trainable_parameters())}
    expected = {
        f"backbone.layers.{at}.mixer.{name}"
        for at, kind in enumerate(LINEAR_ATTENTION["nemotron_h"]["hybrid_override_pattern"])
        for name in ADAPTED[kind]
    }
    assert trained == expected
