"""LoRA on experts, dense and quantised, with sorted and unsorted rows, against float64 NumPy."""

import inspect
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

import adapter_checks
from adapter_checks import assert_agree, float64, value_and_gradients
from deltatune.lora import LoRASwitchLinear, experts
from deltatune.lora.experts import PlainSwitchLinear, projection
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
    if packing and not packing.keys() <= inspect.signature(SwitchLinear.to_quantized).parameters.keys():
        pytest.skip("this mlx-lm has no scale for each expert")
    mx.random.seed(0)
    linear = SwitchLinear(INPUTS, OUTPUTS, EXPERTS, bias=bias)
    if bias:
        linear.bias = mx.random.normal(linear.bias.shape)
    if packing is not None:
        linear = linear.to_quantized(**packing)
    return adapter_checks.adapted(LoRASwitchLinear, linear, RANK, SCALE)


def test_few_rows_go_sorted_on_cuda(monkeypatch):
    """MLX's unsorted products read misaligned memory there for this rank, which ends the process."""
    calls = []

    def gather_mm(*arguments, **options):
        calls.append(options["sorted_indices"])
        return mx.gather_mm(*arguments, **options)

    adapter, indices = adapted(), mx.array([[4, 0], [2, 2]])
    x = mx.random.normal((2, 1, 1, INPUTS))
    expected = adapter(x, indices)
    monkeypatch.setattr(experts.backend, "device", lambda: "cuda")
    monkeypatch.setattr(experts, "mx", SimpleNamespace(**{**vars(mx), "gather_mm": gather_mm}))
    assert mx.allclose(adapter(x, indices), expected, atol=1e-5)
    assert calls == [True, True]


@pytest.mark.parametrize(
    ("packing", "sorted_indices", "bias"),
    [(PACKINGS[0], False, True), (PACKINGS[0], True, False), (PACKINGS[1], True, True), (PACKINGS[2], False, False)],
)
def test_values_and_gradients_against_float64(packing, sorted_indices, bias):
    adapter = adapted(packing, bias)
    rows = 9
    indices = mx.array([4, 0, 2, 2, 0, 4, 4, 1, 2])  # Expert 3 gets no row.
    indices = mx.sort(indices) if sorted_indices else indices
    x, dy = mx.random.normal((rows, 1, INPUTS)), mx.random.normal((rows, 1, OUTPUTS))
    found = value_and_gradients(adapter, lambda x: adapter(x, indices, sorted_indices=sorted_indices), x, dy)
    weight, a, b = float64(dense_weight(adapter.linear)), float64(adapter.lora_a), float64(adapter.lora_b)
    expected = {"y": np.zeros((rows, 1, OUTPUTS)), "x": np.zeros((rows, 1, INPUTS))}
    expected |= {"lora_a": np.zeros_like(a), "lora_b": np.zeros_like(b)}
    for row, expert in enumerate(np.array(indices)):
        row_x, row_dy = float64(x)[row, 0], float64(dy)[row, 0]
        full = weight[expert] + SCALE * b[expert] @ a[expert]
        expected["y"][row, 0] = full @ row_x + (float64(adapter.linear.bias)[expert] if bias else 0)
        expected["x"][row, 0] = full.T @ row_dy
        expected["lora_b"][expert] += SCALE * np.outer(row_dy, a[expert] @ row_x)
        expected["lora_a"][expert] += SCALE * np.outer(b[expert].T @ row_dy, row_x)
    assert_agree(found, expected)
    assert not np.any(float64(found["lora_a"])[3])


@pytest.mark.parametrize("packing", PACKINGS[:3], ids=IDS[:3])
def test_many_unsorted_rows_equal_few(packing):
    """Rows are sorted by expert from 64 indices on, with the same values and gradients as fewer, unsorted rows."""
    adapter = adapted(packing)
    indices = mx.random.randint(0, EXPERTS, (3, 20, 2))
    x, dy = mx.random.normal((3, 20, 1, 1, INPUTS)), mx.random.normal((3, 20, 2, 1, OUTPUTS))

    def in_threes(x: mx.array) -> mx.array:
        return mx.concatenate([adapter(x[i : i + 1], indices[i : i + 1]) for i in range(3)])

    expected = value_and_gradients(adapter, in_threes, x, dy)
    assert_agree(value_and_gradients(adapter, lambda x: adapter(x, indices), x, dy), expected)


def test_the_gradient_of_many_unsorted_rows_holds_no_matrix_per_row(peak_bytes):
    mx.random.seed(0)
    rows, rank = 1024, 16
    adapter = LoRASwitchLinear.from_base(SwitchLinear(INPUTS, OUTPUTS, EXPERTS, bias=False), rank=rank)
    adapter.unfreeze_adapter()
    x, indices = mx.random.normal((rows, 1, INPUTS)), mx.random.randint(0, EXPERTS, (rows,))

    def loss(parameters):
        adapter.update(parameters)
        return adapter(x, indices).sum()

    parameters = adapter.trainable_parameters()
    mx.eval(adapter.parameters(), x, indices)
    assert peak_bytes(lambda: mx.grad(loss)(parameters)) < rows * rank * INPUTS * 4 / 2


def test_sorted_indices_need_one_row_each():
    adapter, indices = adapted(), mx.array([0, 1, 1, 3])
    for x in (mx.zeros((1, 1, INPUTS)), mx.zeros((2, 1, INPUTS)), mx.zeros((4, 1, 1, INPUTS))[:1]):
        with pytest.raises(
            ValueError, match=r"a row \[1, 64\] of x for each of the 4 indices, got x .*repeat the rows"
        ):
            adapter(x, indices, sorted_indices=True)
    assert adapter(mx.zeros((4, 1, INPUTS)), indices, sorted_indices=True).shape == (4, 1, OUTPUTS)


@pytest.mark.parametrize("packing", PACKINGS, ids=IDS)
def test_fuses_to_the_adapted_weight(packing):
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
    # A scale that is a power of two clips up to a quarter of the largest value.
    step = 0.26 * np.abs(full).max() if packing else 1e-6
    assert np.abs(float64(dense_weight(packed)) - full).max() < step
    assert (plain.num_experts, plain.input_dims, plain.output_dims) == (EXPERTS, INPUTS, OUTPUTS)
    if adapter.linear.get("global_scale") is None:  # With one, MLX multiplies on GPUs only.
        indices, x = mx.array([0, 3, 4]), mx.random.normal((3, 1, INPUTS))
        plain.set_dtype(mx.float32)
        assert mx.allclose(plain(x, indices), adapter(x, indices), atol=1e-5 if tolerance == 1e-6 else 0.05)


@pytest.mark.parametrize("name", ["weight_scale_2", "weight_global_scale"])
@pytest.mark.parametrize("shape", [(), (EXPERTS,), (EXPERTS, OUTPUTS)], ids=["one", "an expert", "a row"])
def test_mlx_vlms_nvfp4_experts_keep_their_output_scale(name, shape):
    """The adapter, its dense merge and its quantised merge compute the same layer, which scales its outputs."""
    scaled = pytest.importorskip("mlx_vlm.quantization.nvfp4").ScaledQuantizedSwitchLinear
    mx.random.seed(0)
    packing = {"bits": 4, "group_size": 16, "mode": "nvfp4"}
    base = SwitchLinear(INPUTS, OUTPUTS, EXPERTS, bias=False).to_quantized(**packing)
    base = scaled(base, mx.random.uniform(2.0, 5.0, shape), name)
    adapter = LoRASwitchLinear.from_base(base, rank=RANK, scale=SCALE)
    x, indices = mx.random.normal((3, 1, INPUTS)), mx.array([0, 3, 4])
    assert mx.array_equal(adapter(x, indices), base(x, indices))
    weight = dense_weight(base).astype(mx.float32)
    assert mx.allclose((x @ weight[indices].swapaxes(-1, -2)), base(x, indices), rtol=0.02, atol=0.05)
    adapter.lora_b = 0.2 * mx.random.normal(adapter.lora_b.shape)
    y = adapter(x, indices)
    largest = mx.abs(y).max().item()
    assert mx.abs(adapter.fuse(dequantize=True)(x, indices) - y).max().item() < 0.02 * largest
    packed = adapter.fuse()
    assert type(packed) is scaled
    assert mx.array_equal(packed[name], base[name])
    full = weight + SCALE * adapter.lora_b @ adapter.lora_a
    error = dense_weight(packed).astype(mx.float32) - full
    # Four bits lose that much; a scale that is forgotten or applied twice would be off by a factor of 2 to 5.
    assert mx.linalg.norm(error.flatten()) < 0.15 * mx.linalg.norm(full.flatten())
    assert projection(adapter) is None


def test_experts_are_recognised_by_structure():
    assert is_switch(SwitchLinear(4, 4, 2))
    assert not is_switch(MultiLinear(4, 4, 2))
