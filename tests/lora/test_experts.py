"""LoRA on experts, dense and quantised, sorted and not, against float64 NumPy and mlx-lm's own layer."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear as UpstreamLoRASwitchLinear
from packaging.version import Version

from deltatune.lora import LoRASwitchLinear
from deltatune.lora.experts import PlainSwitchLinear
from deltatune.lora.weights import dense_weight, is_switch

EXPERTS, INPUTS, OUTPUTS, RANK, SCALE = 5, 64, 24, 3, 1.4
PACKINGS = [
    None,
    {"bits": 3, "group_size": 32},
    {"bits": 4, "group_size": 32},
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    {"bits": 4, "group_size": 16, "mode": "nvfp4", "global_scale": True},
]
IDS = ["dense", "3bit", "4bit", "mxfp4", "nvfp4_global"]


def adapted(packing=None, bias: bool = False) -> LoRASwitchLinear:
    if packing and "global_scale" in packing and Version(mlx_lm.__version__) < Version("0.32"):
        pytest.skip(f"mlx-lm {mlx_lm.__version__} has no scale for each expert")
    mx.random.seed(0)
    linear = SwitchLinear(INPUTS, OUTPUTS, EXPERTS, bias=bias)
    if bias:
        linear.bias = mx.random.normal(linear.bias.shape)
    if packing is not None:
        linear = linear.to_quantized(**packing)
    adapter = LoRASwitchLinear.from_base(linear, rank=RANK, scale=SCALE)
    adapter.lora_b = 0.2 * mx.random.normal(adapter.lora_b.shape)
    adapter.unfreeze_adapter()
    return adapter


def float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sorted_indices", [False, True])
@pytest.mark.parametrize("packing", PACKINGS[:3], ids=IDS[:3])
def test_values_and_gradients_against_float64(packing, sorted_indices, bias):
    adapter = adapted(packing, bias)
    rows = 9
    indices = mx.array([4, 0, 2, 2, 0, 4, 4, 1, 2])  # Expert 3 gets no row.
    indices = mx.sort(indices) if sorted_indices else indices
    x, dy = mx.random.normal((rows, 1, INPUTS)), mx.random.normal((rows, 1, OUTPUTS))

    def loss(parameters, x):
        adapter.update(parameters)
        return (adapter(x, indices, sorted_indices=sorted_indices) * dy).sum()

    parameters = adapter.trainable_parameters()
    found, dx = mx.grad(loss, argnums=(0, 1))(parameters, x)
    adapter.update(parameters)
    y = adapter(x, indices, sorted_indices=sorted_indices)

    weight, a, b = float64(dense_weight(adapter.linear)), float64(adapter.lora_a), float64(adapter.lora_b)
    expected = {"y": np.zeros((rows, OUTPUTS)), "x": np.zeros((rows, INPUTS))}
    expected |= {"lora_a": np.zeros_like(a), "lora_b": np.zeros_like(b)}
    for row, expert in enumerate(np.array(indices)):
        row_x, row_dy = float64(x)[row, 0], float64(dy)[row, 0]
        full = weight[expert] + SCALE * b[expert] @ a[expert]
        expected["y"][row] = full @ row_x + (float64(adapter.linear.bias)[expert] if bias else 0)
        expected["x"][row] = full.T @ row_dy
        expected["lora_b"][expert] += SCALE * np.outer(row_dy, a[expert] @ row_x)
        expected["lora_a"][expert] += SCALE * np.outer(b[expert].T @ row_dy, row_x)
    found = {**dict(tree_flatten(found)), "y": y[:, 0], "x": dx[:, 0]}
    for name, value in expected.items():
        assert np.abs(float64(found[name]) - value).max() <= 2e-6 * np.abs(value).max(), name
    assert not np.any(float64(found["lora_a"])[3])


def test_several_experts_for_each_token():
    adapter = adapted()
    indices = mx.array([[[4, 0], [2, 2]]])
    x = mx.random.normal((1, 2, 1, 1, INPUTS))
    y = adapter(x, indices)
    assert y.shape == (1, 2, 2, 1, OUTPUTS)
    full = float64(adapter.linear.weight) + SCALE * float64(adapter.lora_b) @ float64(adapter.lora_a)
    assert np.allclose(float64(y)[0, 0, 1, 0], full[0] @ float64(x)[0, 0, 0, 0], atol=1e-5)


@pytest.mark.parametrize("packing", PACKINGS, ids=IDS)
def test_fuses_to_what_it_says(packing):
    adapter = adapted(packing)
    full = float64(dense_weight(adapter.linear)) + SCALE * float64(adapter.lora_b) @ float64(adapter.lora_a)
    plain = adapter.fuse(dequantize=True)
    assert type(plain) is (SwitchLinear if packing is None else PlainSwitchLinear)
    tolerance = 1e-6 if plain.weight.dtype == mx.float32 else 0.01
    assert np.abs(float64(plain.weight) - full).max() < tolerance
    packed = adapter.fuse()
    assert type(packed) is type(adapter.linear)
    if packing and "global_scale" not in packing:
        weight, scales, *_ = mx.quantize(plain.weight, **packing)
        assert mx.array_equal(packed.weight, weight)
        assert mx.array_equal(packed.scales, scales)
    # A power of two as scale cuts off up to a quarter of the largest value.
    step = 0.26 * np.abs(full).max() if packing else 1e-6
    assert np.abs(float64(dense_weight(packed)) - full).max() < step
    assert (plain.num_experts, plain.input_dims, plain.output_dims) == (EXPERTS, INPUTS, OUTPUTS)
    if adapter.linear.get("global_scale") is None:  # With one, MLX multiplies on GPUs only.
        indices, x = mx.array([0, 3, 4]), mx.random.normal((3, 1, INPUTS))
        plain.set_dtype(mx.float32)
        assert mx.allclose(plain(x, indices), adapter(x, indices), atol=1e-5 if tolerance == 1e-6 else 0.05)


@pytest.mark.parametrize("packing", PACKINGS[:3], ids=IDS[:3])
def test_same_names_shapes_and_values_as_mlx_lm(packing):
    adapter = adapted(packing)
    theirs = UpstreamLoRASwitchLinear.from_base(adapter.linear, r=RANK, scale=SCALE)
    ours = dict(tree_flatten(adapter.parameters()))
    assert {name: value.shape for name, value in ours.items()} == {
        name: value.shape for name, value in tree_flatten(theirs.parameters())
    }
    theirs.load_weights(list(ours.items()))
    indices, x = mx.array([0, 3, 4]), mx.random.normal((3, 1, INPUTS))
    assert mx.array_equal(adapter(x, indices), theirs(x, indices))


def test_experts_are_told_by_structure():
    assert is_switch(SwitchLinear(4, 4, 2))
    assert is_switch(PlainSwitchLinear()) is False
    assert not is_switch(MultiLinear(4, 4, 2))
