"""LoRA and DoRA on linear layers: values and gradients against float64 NumPy.

test_adapter_files.py lets mlx-lm load what they save, and compares the outputs.
"""

import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import adapter_checks
from adapter_checks import assert_agree, float64, value_and_gradients
from checkpointing import checkpoint
from deltatune.lora import DoRALinear, LoRALinear, linear
from deltatune.lora.linear import factor_dtypes, with_low_rank
from deltatune.lora.weights import dense_weight

PACKINGS = [
    None,
    *({"mode": "affine", "bits": bits, "group_size": 32} for bits in (2, 3, 4, 5, 6, 8)),
    {"mode": "mxfp4", "bits": 4, "group_size": 32},
    {"mode": "mxfp8", "bits": 8, "group_size": 32},
    {"mode": "nvfp4", "bits": 4, "group_size": 16},
]
IDS = ["dense", *(f"{p['mode']}{p['bits']}" for p in PACKINGS[1:])]
INPUTS, OUTPUTS, RANK, SCALE = 96, 40, 5, 1.7


def base(packing=None, bias: bool = True, seed: int = 0) -> nn.Module:
    mx.random.seed(seed)
    linear = nn.Linear(INPUTS, OUTPUTS, bias=bias)
    if packing is None:
        return linear
    return nn.QuantizedLinear.from_linear(linear, packing["group_size"], packing["bits"], mode=packing["mode"])


def adapted(kind, packing=None, bias: bool = True, dropout: float = 0.0) -> nn.Module:
    return adapter_checks.adapted(kind, base(packing, bias), RANK, SCALE, dropout)


def reference(adapter: nn.Module, x: np.ndarray, dy: np.ndarray) -> dict[str, np.ndarray]:
    """y and the gradients of sum(y * dy), in float64; DoRA's norm is a constant, as in its paper."""
    weight, a, b = float64(dense_weight(adapter.linear)), float64(adapter.lora_a), float64(adapter.lora_b)
    plain = x @ weight.T + SCALE * (x @ a) @ b
    factor, gradients = np.ones(OUTPUTS), {}
    if "m" in adapter:
        norm = np.linalg.norm(weight + SCALE * (a @ b).T, axis=1)
        factor = float64(adapter.m) / norm
        gradients["m"] = (plain * dy).sum(0) / norm
    inner = dy * factor
    gradients["lora_a"] = SCALE * x.T @ (inner @ b.T)
    gradients["lora_b"] = SCALE * (x @ a).T @ inner
    gradients["x"] = inner @ weight + SCALE * (inner @ b.T) @ a.T
    bias = float64(adapter.linear.bias) if "bias" in adapter.linear else 0.0
    return {"y": plain * factor + bias, **gradients}


@pytest.mark.parametrize("packing", PACKINGS, ids=IDS)
@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
def test_values_and_gradients_against_float64(kind, packing):
    """Dense layers and every second packing have a bias."""
    adapter = adapted(kind, packing, PACKINGS.index(packing) % 2 == 0)
    x, dy = mx.random.normal((7, INPUTS)), mx.random.normal((7, OUTPUTS))
    assert_agree(value_and_gradients(adapter, adapter, x, dy), reference(adapter, float64(x), float64(dy)))


@pytest.mark.parametrize("packing", PACKINGS, ids=IDS)
@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
def test_starts_as_the_base_and_fuses_to_its_own_values(kind, packing):
    linear = base(packing)
    adapter = kind.from_base(linear, rank=RANK, scale=SCALE)
    x = mx.random.normal((7, INPUTS))
    assert mx.allclose(adapter(x), linear(x), atol=1e-6)
    adapter = adapted(kind, packing)
    plain = adapter.fuse(dequantize=True)
    assert type(plain) is nn.Linear
    # MLX dequantises to bf16 in the modes without biases, which rounds the fused weight.
    assert mx.allclose(plain(x), adapter(x), atol=1e-5 if plain.weight.dtype == mx.float32 else 0.05)
    packed = adapter.fuse()
    assert type(packed) is type(linear)
    assert {name: value.shape for name, value in tree_flatten(packed.parameters())} == {
        name: value.shape for name, value in tree_flatten(linear.parameters())
    }
    assert not mx.array_equal(packed.weight, linear.weight)
    adapter.linear.freeze()
    adapter.fuse().unfreeze()
    assert not tree_flatten(adapter.linear.trainable_parameters())


@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
def test_half_precision_stays_half(kind):
    adapter = adapted(kind)
    adapter.linear.set_dtype(mx.bfloat16)
    x = mx.random.normal((3, INPUTS)).astype(mx.bfloat16)
    assert adapter(x).dtype == mx.bfloat16
    assert adapter.lora_a.dtype == mx.float32
    assert adapter.fuse().weight.dtype == mx.bfloat16


def test_dropout_drops_inputs_of_the_update_alone():
    adapter = adapted(LoRALinear, dropout=0.4)
    x = mx.ones((2000, INPUTS))
    assert mx.array_equal(adapter.eval()(x), adapter(x))
    without_dropout = adapter(x)
    adapter.train()
    with_dropout = adapter(x)
    assert mx.abs(with_dropout - without_dropout).max() > 0.1
    assert mx.abs(with_dropout.mean(0) - without_dropout.mean(0)).max() < 0.05
    adapter.lora_b = mx.zeros_like(adapter.lora_b)
    assert mx.array_equal(adapter(x), adapter.linear(x))


@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_dropout_in_steps_checkpointed_and_compiled(kind, compiled):
    """Each step draws a new mask, a recomputed layer draws the same one again, and compiling changes nothing."""
    x = mx.random.normal((7, INPUTS))

    def steps(checkpointed: bool, compiled: bool) -> list[dict[str, mx.array]]:
        adapter = adapted(kind, dropout=0.3)
        adapter.train()

        def loss(parameters):
            adapter.update(parameters)
            return (checkpoint(adapter)(x) if checkpointed else adapter(x)).square().sum()

        def step(parameters):
            return dict(tree_flatten(mx.grad(loss)(parameters)))

        if compiled:
            step = mx.compile(step, inputs=mx.random.state, outputs=mx.random.state)
        parameters = adapter.trainable_parameters()
        mx.random.seed(11)
        found = [step(parameters) for _ in range(2)]
        mx.eval(found)
        return found

    plain, again = steps(False, False), steps(True, compiled)
    assert not mx.allclose(plain[0]["lora_b"], plain[1]["lora_b"], rtol=1e-2)
    for expected, found in zip(plain, again, strict=True):
        for name in expected:
            assert mx.allclose(found[name], expected[name], rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", [(2, 7, INPUTS), (7, INPUTS), (2, 3, 5, INPUTS)])
def test_the_update_as_one_function_has_the_gradients_of_its_products(shape, device, monkeypatch):
    monkeypatch.setattr(linear.backend, "device", lambda: device)
    mx.random.seed(1)
    x, w = mx.random.normal(shape), mx.random.normal((INPUTS, OUTPUTS))
    a, b = 0.3 * mx.random.normal((INPUTS, RANK)), 0.3 * mx.random.normal((RANK, OUTPUTS))
    dy = mx.random.normal((*shape[:-1], OUTPUTS))
    found = mx.vjp(lambda x, w, a, b: with_low_rank(lambda x: mx.sin(x @ w), x, a, b, SCALE), [x, w, a, b], [dy])
    expected = mx.vjp(lambda x, w, a, b: mx.sin(x @ w) + SCALE * ((x @ a) @ b), [x, w, a, b], [dy])
    for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def test_gradients_of_base_and_update_are_added_within_a_product(tmp_path):
    """A sum by itself would be one more launch for each linear on a GPU."""
    layer, x, dy = adapted(LoRALinear), mx.random.normal((7, INPUTS)), mx.random.normal((7, OUTPUTS))
    mx.eval(layer.parameters(), x, dy)
    ((dx,),) = mx.vjp(lambda x: [layer(x)], [x], [dy])[1:]
    mx.export_to_dot(str(tmp_path / "graph.dot"), dx)
    kinds = re.findall('label ="([A-Za-z]+)"', (tmp_path / "graph.dot").read_text())
    # On a GPU the product with the scale is an AddMM, too.
    scaled = int(linear.backend.device() != "cpu")
    assert kinds.count("AddMM") == 1 + scaled
    assert kinds.count("Matmul") == 2 - scaled
    assert "Add" not in kinds


def test_on_a_gpu_the_factors_are_cast_to_the_input(monkeypatch):
    """The GPU's path, run on a CPU, differs from the CPU's by bf16's rounding only, and its gradients are fp32."""
    monkeypatch.setattr(linear.backend, "device", lambda: "cpu")
    made = adapted(LoRALinear)
    made.linear.set_dtype(mx.bfloat16)
    made.freeze()
    made.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    x = mx.random.normal((2, 7, INPUTS)).astype(mx.bfloat16)
    step = nn.value_and_grad(made, lambda x: (made(x).astype(mx.float32) ** 2).sum())
    expected_loss, expected = step(x)
    assert factor_dtypes(made) == {}
    monkeypatch.setattr(linear.backend, "device", lambda: "cuda")
    assert made(x).dtype == mx.bfloat16
    loss, found = step(x)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-2)
    for name in ("lora_a", "lora_b"):
        assert found[name].dtype == mx.float32
        difference = mx.linalg.norm(found[name] - expected[name]) / mx.linalg.norm(expected[name])
        assert difference.item() < 1e-2, name
    whole = nn.Sequential(made, nn.Linear(OUTPUTS, 3))
    assert factor_dtypes(whole) == {f"layers.0.{name}": mx.bfloat16 for name in ("lora_a", "lora_b")}


@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
def test_which_factors_are_used_in_another_dtype_than_theirs(kind, monkeypatch):
    monkeypatch.setattr(linear.backend, "device", lambda: "metal")
    plain, packed = adapted(kind), adapted(kind, PACKINGS[1])
    assert factor_dtypes(nn.Sequential(plain, packed)) == {}
    packed.linear.scales = packed.linear.scales.astype(mx.float16)
    named = {f"layers.0.{name}": mx.float16 for name in ("lora_a", "lora_b")}
    assert factor_dtypes(nn.Sequential(packed)) == (named if kind is LoRALinear else {})


@pytest.mark.parametrize("rows", [(1,), (4, 1)], ids=str)
def test_a_decoders_token_takes_no_custom_function_and_has_gradients(rows, monkeypatch):
    layer = LoRALinear.from_base(nn.Linear(12, 7), rank=3, scale=2.0)
    layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(0))
    x = mx.random.normal((*rows, 12), key=mx.random.key(1))

    def plain(x: mx.array) -> mx.array:
        return layer.linear(x) + layer.scale * (x @ layer.lora_a) @ layer.lora_b

    monkeypatch.setattr(mx, "custom_function", None)
    found, wanted = mx.value_and_grad(lambda x: layer(x).sum())(x), mx.value_and_grad(lambda x: plain(x).sum())(x)
    # Sums of at most 12 * 7 products.
    for one, other in zip(found, wanted, strict=True):
        assert mx.allclose(one, other, rtol=84 * 2.0**-23, atol=84 * 2.0**-23)
