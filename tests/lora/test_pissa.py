"""PiSSA: its start, its gradients, and the saved adapter on the original base."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from deltatune.errors import UserError
from deltatune.lora import convert_to_lora, load_adapters, save_adapters
from deltatune.lora.pissa import PiSSALinear, principal_factors, starts
from deltatune.lora.weights import dense_weight
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train.setup import prepare

RANK, SCALE = 4, 2.5


def linear(kind="dense", inputs=96, outputs=64):
    """A layer with a weight of singular values that fall by a tenth each, so that its principal part is well known."""
    draw = np.random.default_rng(0)
    u, _ = np.linalg.qr(draw.standard_normal((outputs, outputs)))
    v, _ = np.linalg.qr(draw.standard_normal((inputs, outputs)))
    made = nn.Linear(inputs, outputs)
    made.weight = mx.array(((u * 0.9 ** np.arange(outputs)) @ v.T).astype(np.float32))
    return made if kind == "dense" else nn.QuantizedLinear.from_linear(made, 32, 4)


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (6, 40)])
def test_factors_are_the_best_approximation(shape):
    weight = np.array(dense_weight(linear()), np.float64)
    weight = weight if shape == (64, 96) else weight.T if shape == (96, 64) else weight[:6, :40]
    mx.random.seed(1)
    a, b = principal_factors(mx.array(weight.astype(np.float32)), RANK, SCALE)
    u, s, vt = np.linalg.svd(weight)
    best = (u[:, :RANK] * s[:RANK]) @ vt[:RANK]
    found = SCALE * (np.array(a, np.float64) @ np.array(b, np.float64)).T
    # The iteration leaves (s[20] / s[3])^33 of the other directions, below 1e-24; fp32 rounds s[0] to 6e-8 of it.
    assert np.linalg.norm(found - best) < 2e-5 * s[0]
    np.testing.assert_allclose(np.linalg.norm(np.array(a), axis=0), np.sqrt(s[:RANK] / SCALE), rtol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(np.array(b), axis=1), np.sqrt(s[:RANK] / SCALE), rtol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["dense", "quantized"])
def test_outputs_and_gradients_are_those_of_the_residual(kind, dropout):
    """The definition: the residual W - scale (A0 B0)^T is frozen, and A and B train beside it."""
    layer = PiSSALinear.from_base(linear(kind), RANK, SCALE, dropout)
    layer.unfreeze_adapter()
    layer.train()
    a, b = starts(layer)[""]
    base = dense_weight(layer.linear)
    residual = base - SCALE * (a @ b).T
    x, mask = mx.random.normal((3, 5, 96)), mx.random.normal((3, 5, 64))

    def defined(x, a, b):
        return [x @ residual.T + layer.linear.bias + SCALE * layer.dropout(x) @ a @ b]

    def ours(x, a, b):
        layer.lora_a, layer.lora_b = a, b
        return [layer(x)]

    at = a + 0.1 * mx.random.normal(a.shape), b + 0.1 * mx.random.normal(b.shape)
    results = []
    for function in (defined, ours):
        mx.random.seed(9)
        outputs, gradients = mx.vjp(function, [x, *at], [mask])
        results.append(outputs + gradients)
    for one, other in zip(*results, strict=True):
        assert mx.abs(one - other).max() < 2e-5 * mx.abs(other).max()
    layer.start_at(a, b)
    layer.eval()
    np.testing.assert_allclose(layer(x), layer.linear(x), rtol=0, atol=5e-6)
    assert {name for name, _ in tree_flatten(layer.trainable_parameters())} == {"lora_a", "lora_b"}


@pytest.mark.parametrize("kind", ["dense", "quantized"])
def test_saved_pissa_adapter_works_on_the_original_base(tiny_model, tmp_path, kind):
    def base():
        made = tiny_model("qwen3_next", num_hidden_layers=2, full_attention_interval=2)
        if kind == "quantized":
            nn.quantize(made, 32, 4)
        return made

    model, tokens = base(), mx.array([[3, 9, 4, 7, 9, 30]])
    expected = model(tokens)
    before = {name: np.array(leaf) for name, leaf in tree_flatten(model.parameters())}
    report = convert_to_lora(model, LoraConfig(rank=RANK, scale=SCALE, init="pissa"))
    assert len(starts(model)) > 5
    (note,) = [note for note in report.notes if "PiSSA" in note]
    assert note.startswith("PiSSA starts linear layers alone; ")
    assert mx.abs(model(tokens) - expected).max() < 2e-4 * mx.abs(expected).max()
    kept = {
        name.replace(".linear.", ".").replace(".embedding.", "."): leaf
        for name, leaf in tree_flatten(model.parameters())
    }
    for name, leaf in before.items():
        np.testing.assert_array_equal(kept[name], leaf, err_msg=name)
    for _, leaf in tree_flatten(model.trainable_parameters()):
        leaf[...] = leaf + 0.02 * mx.random.normal(leaf.shape)
    trained = model(tokens)
    assert mx.abs(trained - expected).max() > 1e-2 * mx.abs(expected).max()
    save_adapters(model, tmp_path, {})
    other = base()
    load_adapters(other, tmp_path)
    assert mx.abs(other(tokens) - trained).max() < 2e-4 * mx.abs(trained).max()
    merged = next(module for module in model.modules() if isinstance(module, PiSSALinear)).fuse(dequantize=True)
    assert merged.weight.ndim == 2


@pytest.mark.bad_input("{what}")
@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("`init: pissa` with DoRA", {"fine_tune_type": "dora"}, "init: pissa is a start of LoRA"),
        ("`init: pissa` with saved adapters", {"resume_adapter_file": "a.safetensors"}, "leave one of them out"),
    ],
)
def test_pissa_refuses_weights_without_a_start(tiny_model, what, options, message):
    model = tiny_model("qwen3_5", num_hidden_layers=2, full_attention_interval=2)
    with pytest.raises(UserError, match=message):
        prepare(model, TrainConfig(lora_parameters=LoraConfig(rank=2, init="pissa"), **options))
