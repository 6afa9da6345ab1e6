"""Tests that a step by layers has the bits of a step as a whole, for every family and way of training."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from deltatune.errors import UserError
from deltatune.layers import describe
from deltatune.models.load import load
from deltatune.train.batch_loss import arrays, mean_loss_and_gradients
from deltatune.train.by_layer.layer_functions import signature
from deltatune.train.by_layer.layer_passes import LayerPasses
from deltatune.train.evaluation.nonfinite import first_place
from deltatune.train.setup import training
from layer_runs import assert_same_bits, batch, by_layers, loaded, options, served, whole

CASES = {
    "DoRA": ("qwen3_5", {"fine_tune_type": "dora"}),
    "dropout in packed rows": ("qwen3_5", {"dropout": 0.2, "pack": True}),
    "an embedding that trains and is the head": (
        "qwen3_5",
        {"keys": ["*.q_proj", "language_model.model.embed_tokens"]},
    ),
    "experts": ("qwen3_5_moe", {"router_aux_loss_coef": 0.1}),
    "ranks by pattern, those of one layer others than of its kind": (
        "qwen3_5_moe",
        {"rank_pattern": {"language_model.model.layers.1.mlp.*": 1, "mlp.switch_mlp.*": 2}, "pack": True},
    ),
    "upper layers alone": ("qwen3_next", {"num_layers": 2}),
    "a gate per channel": ("kimi_linear", {"dropout": 0.1, "pack": True}),
    "another family": ("olmo_hybrid", {"pack": True}),
    "windows": ("gemma3_text", {}),
}


# The others differ from one of these in a part that has a test of its own.
OFTEN = (
    "dropout in packed rows",
    "an embedding that trains and is the head",
    "experts",
    "upper layers alone",
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.weekly] * (case not in OFTEN)) for case in CASES]
)
def test_a_step_by_layers_has_the_bits_of_a_whole_step(tiny_checkpoint, case):
    family, changes = CASES[case]
    folder = tiny_checkpoint(family)
    config, given = options(folder, **changes), batch(packed=changes.get("pack", False))
    expected, loss = whole(folder, config, given)
    found, same_loss, weights, _ = by_layers(folder, config, given)
    assert_same_bits(expected, found)
    assert loss == same_loss
    assert weights.disk.read > 0


@pytest.mark.parametrize(
    ("quantize", "dtype"), [({}, mx.bfloat16), pytest.param({}, mx.float32, marks=pytest.mark.weekly)]
)
def test_weights_of_four_and_sixteen_bits_stream_with_the_same_bits(tiny_checkpoint, quantize, dtype):
    folder = tiny_checkpoint("qwen3_5", quantize=quantize, dtype=dtype)
    config, given = options(folder), batch()
    assert_same_bits(whole(folder, config, given)[0], by_layers(folder, config, given)[0])


def test_layers_that_stay_are_not_read(tiny_checkpoint):
    folder = tiny_checkpoint("qwen3_5")
    config, given = options(folder), batch()
    expected, _ = whole(folder, config, given)
    found, _, weights, _ = by_layers(folder, config, given, streamed=[1, 3])
    assert_same_bits(expected, found)
    _, _, every, _ = by_layers(folder, config, given)
    assert 0 < weights.disk.read < every.disk.read


@pytest.mark.parametrize("where", ["output", "gradient", "loss", "nothing"])
def test_nonfinite_tensor_is_named_as_in_a_whole_step(tiny_checkpoint, where):
    folder = tiny_checkpoint("qwen3_5")
    config, given = options(folder), batch()
    model, stored = loaded(folder, config)
    if where == "output":
        adapter = model.layers[2].mlp.down_proj
        adapter.lora_b = adapter.lora_b * 1e38
        adapter.lora_a = adapter.lora_a * 1e38

    def loss(inputs, targets, weights):
        logits = model(inputs)
        total = (nn.losses.cross_entropy(logits, targets) * weights).sum()
        # The derivative of sqrt at 0 is infinite, and infinity times the 0 of x * 0 is NaN.
        more = {"gradient": mx.sqrt(logits * 0).sum(), "loss": mx.log(mx.array(0.0))}
        return total + more.get(where, 0), weights.sum()

    watched = [(f"layer {index}", layer) for index, layer in enumerate(model.layers)]
    with training(model, config, compare=False):
        model.train()
        expected = first_place(model, loss, given, watched)
    with served(model, stored, config, loss) as (_, passes):
        assert first_place(model, loss, given, watched, passes) == expected
    said = {"output": "output of layer 2", "gradient": "reaches the output of layer 3", "loss": "but the loss is not"}
    assert said.get(where, "None") in str(expected)


def test_layers_that_compute_alike_share_one_function(tiny_checkpoint):
    """Three recurrent layers and one with attention; training and evaluation have functions of their own."""
    folder = tiny_checkpoint("qwen3_5")
    *_, passes = by_layers(folder, options(folder), batch())
    assert len(passes._functions) == 4


def test_layers_that_differ_in_a_number_that_nothing_reads_share_one_function(tiny_checkpoint):
    """Kimi-Linear's recurrent mixers keep their position, which their forward pass does not read."""
    layers = [layer.module for layer in describe(load(tiny_checkpoint("kimi_linear"), lazy=True).model)]
    positions = [layer.self_attn.layer_idx for layer in layers if hasattr(layer.self_attn, "layer_idx")]
    assert len(set(positions)) == len(positions) > 1
    kinds = {(type(layer.self_attn), type(layer.mlp)) for layer in layers}
    assert len({signature(layer) for layer in layers}) == len(kinds)


def test_layers_that_differ_in_a_number_that_is_read_do_not():
    class Scaled(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def __call__(self, x):
            return x * self.factor

    assert signature(Scaled(2)) == signature(Scaled(2))
    assert signature(Scaled(2)) != signature(Scaled(3))


def test_two_batches_of_other_shapes_and_rules(tiny_checkpoint):
    """Functions compiled for a packed batch must not serve one of whole documents, nor the other way round."""
    folder = tiny_checkpoint("qwen3_5")
    config = options(folder)
    model, stored = loaded(folder, config)
    batches = [batch(packed=True), batch(), batch(packed=True, seed=1)]
    with training(model, config, compare=False) as trained:
        model.train()
        expected = [mean_loss_and_gradients(model, trained.loss, arrays(each)) for each in batches]
        mx.eval(expected)
    with served(model, stored, config) as (_, passes):
        for given, wanted in zip(batches, expected, strict=True):
            found = passes.gradients(arrays(given), model.trainable_parameters(), mx.random.key(0))
            assert_same_bits(wanted, found)


def test_no_more_than_two_layers_are_in_memory(tiny_checkpoint):
    folder = tiny_checkpoint("qwen3_5", num_hidden_layers=8, intermediate_size=4096)
    config, given = options(folder, num_layers=1), batch()
    model, stored = loaded(folder, config)
    layer = 3 * 64 * 4096 * 4
    with training(model, config, compare=False) as trained:
        model.train()
        layers = [layer.module for layer in trained.layers]
        before = mx.get_active_memory()
        stored.place(model, layers, range(8))
        assert mx.get_active_memory() - before < layer
        passes = LayerPasses(model, trained.loss, stored)
        with passes.served():
            for _ in range(2):
                passes.gradients(arrays(given), model.trainable_parameters(), mx.random.key(0))
                mx.synchronize()
                assert mx.get_active_memory() - before < 2.5 * layer
            model.eval()
            assert model(mx.zeros((1, 4), mx.int32)).shape[1] == 4
            mx.synchronize()
            assert mx.get_active_memory() - before < 3.5 * layer
        stored.close()


@pytest.mark.bad_input("`--memory` for a model that calls none of its layers")
def test_a_model_that_passes_its_layers_by_is_refused(tiny_checkpoint, monkeypatch):
    folder = tiny_checkpoint("gemma3_text")
    text_model = type(load(folder, lazy=True).model.model)
    monkeypatch.setattr(text_model, "__call__", lambda self, inputs, *_, **__: self.embed_tokens(inputs))
    with pytest.raises(UserError, match="memory: this model calls 0 of its 4 layers"):
        by_layers(folder, options(folder), batch())


@pytest.mark.bad_input("`--memory` for a model whose layers cannot be computed one by one")
def test_a_model_with_more_between_its_layers_is_refused(tiny_checkpoint):
    """kimi_k3 hands a container of all outputs from layer to layer."""
    folder = tiny_checkpoint("kimi_k3")
    with pytest.raises(UserError, match=r"memory: .*layers.* leave memory out"):
        by_layers(folder, options(folder), batch())
