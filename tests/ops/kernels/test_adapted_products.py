"""Linear layers with LoRA that read one input, by kernels on the host machine, against float64."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from beside import load
from deltatune.lora.linear import LoRALinear
from deltatune.lora.together import together
from deltatune.ops.operator.measure import as_float64
from deltatune.ops.products import quantized_product
from deltatune.ops.products.adapted_products import AdaptedMatrix, adapted_products
from deltatune.ops.products.quantized_product import Quantization
from deltatune.ops.recomputation import cheap_recomputed, remembered

of_one_adapter = load(Path(__file__).parent / "test_low_rank.py")
_drawn = of_one_adapter._drawn
make_machine, gpu, on_gpu = of_one_adapter.make_machine, of_one_adapter.gpu, of_one_adapter.on_gpu
SCALE = 1.75


def _gradients(x: np.ndarray, layers: list[list[np.ndarray]], dys: list[np.ndarray]) -> tuple[list, list]:
    """The results of layers, each of a weight, a and b, and the gradients of x and of these, in float64."""
    results, gradients = [], [0.0]
    for (weight, a, b), dy in zip(layers, dys, strict=True):
        results.append(x @ weight.T + SCALE * x @ a @ b)
        gradients[0] = gradients[0] + dy @ weight + SCALE * dy @ b.T @ a.T
        gradients += [np.einsum("ijn,ijk->nk", dy, x), SCALE * np.einsum("ijk,ijr->kr", x, dy @ b.T)]
        gradients.append(SCALE * np.einsum("ijr,ijn->rn", x @ a, dy))
    return results, gradients


# The number of adapters and their rank: those that the kernels take together, and those that they take one by one.
@pytest.mark.parametrize(("count", "rank"), [(1, 8), (3, 8), (2, 4), (3, 32)])
def test_layers_and_their_gradients_against_float64(count, rank, on_gpu):
    sizes = [64, 40, 16][:count]
    shapes = [(2, 9, 32)]
    for outputs in sizes:
        shapes += [(outputs, 32), (32, rank), (rank, outputs), (2, 9, outputs)]
    x, *rest = _drawn(*shapes)
    matrices = [rest[4 * i : 4 * i + 3] for i in range(count)]
    cotangents = [rest[4 * i + 3] for i in range(count)]

    def function(x: mx.array, *arrays: mx.array) -> list[mx.array]:
        return adapted_products(
            x, [AdaptedMatrix(arrays[3 * i : 3 * i + 1], *arrays[3 * i + 1 : 3 * i + 3]) for i in range(count)], SCALE
        )

    outputs, gradients = mx.vjp(function, [x, *(a for matrix in matrices for a in matrix)], cotangents)
    mx.eval(outputs, gradients)
    once = 1 if count == 1 or rank == 8 else count
    launches = {"rows": once, "wide": count + once, "both": count, "columns": once}
    assert {name: on_gpu.count(f"low_rank_{name}") for name in launches} == launches
    layers = [list(map(as_float64, matrix)) for matrix in matrices]
    exact, expected = _gradients(as_float64(x), layers, list(map(as_float64, cotangents)))
    for found, right in zip((*outputs, *gradients), (*exact, *expected), strict=True):
        # Results are rounded to bf16 once for each product that is added to them.
        assert np.abs(as_float64(found) - right).max() <= (1 + 2 * count) * 2.0**-8 * np.abs(right).max()


def test_an_input_that_is_computed_again_gives_the_same_bits(on_gpu):
    x, weight, a, b, dy = _drawn((9, 32), (40, 32), (32, 8), (8, 40), (9, 40))
    computed = []

    def scaled(x: mx.array) -> list[mx.array]:
        computed.append(x)
        return [x * 1.5]

    def function(x: mx.array, a: mx.array, b: mx.array) -> list[mx.array]:
        (y,) = remembered(scaled, x)
        return adapted_products(y, [AdaptedMatrix([weight], a, b)], SCALE)

    wanted = mx.vjp(function, [x, a, b], [dy])
    assert len(computed) == 1
    with cheap_recomputed():
        found = mx.vjp(function, [x, a, b], [dy])
    assert len(computed) == 3
    for one, other in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
        assert mx.array_equal(one, other)


PACKINGS = {
    "affine": {"group_size": 32, "bits": 4, "mode": "affine"},
    "affine, in slabs": {"group_size": 32, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_layers_and_their_gradients_against_float64(packing, on_gpu, monkeypatch):
    """The second of three matrices is dense. In slabs, a matrix is unpacked 16 rows at a time."""
    if "slabs" in packing:
        monkeypatch.setitem(quantized_product.SLAB_BYTES, "cuda", 16 * 64 * 2)
    options = PACKINGS[packing]
    x, *rest = _drawn((2, 9, 64), *[(40, 64), (64, 8), (8, 40), (2, 9, 40)] * 3)
    packed = [list(mx.quantize(rest[4 * i], **options)) for i in (0, 2)]
    weights = [packed[0], [rest[4]], packed[1]]
    dense = [mx.dequantize(*packed[0], **options), rest[4], mx.dequantize(*packed[1], **options)]
    kinds = [Quantization(True, **options), None, Quantization(True, **options)]
    factors, cotangents = [rest[4 * i + 1 : 4 * i + 3] for i in range(3)], rest[3::4]

    def function(x: mx.array, weights: list[list[mx.array]], factors: list[list[mx.array]]) -> list[mx.array]:
        zipped = zip(weights, factors, kinds, strict=True)
        return adapted_products(x, [AdaptedMatrix(weight, *pair, kind) for weight, pair, kind in zipped], SCALE)

    flat = [x, *(factor for pair in factors for factor in pair)]
    outputs, gradients = mx.vjp(
        lambda x, *flat: function(x, weights, [flat[2 * i : 2 * i + 2] for i in range(3)]), flat, cotangents
    )
    mx.eval(outputs, gradients)
    assert sorted(on_gpu) == ["low_rank_both"] * 3 + ["low_rank_columns", "low_rank_rows"] + ["low_rank_wide"] * 4
    layers = [list(map(as_float64, (weight, *pair))) for weight, pair in zip(dense, factors, strict=True)]
    exact, expected = _gradients(as_float64(x), layers, list(map(as_float64, cotangents)))
    # A packed weight has no gradient.
    del expected[1::3]
    for found, right in zip((*outputs, *gradients), (*exact, *expected), strict=True):
        assert np.abs(as_float64(found) - right).max() <= 8 * 2.0**-8 * np.abs(right).max()


def test_the_gradients_of_a_packed_layers_scales_are_those_of_mlx(on_gpu):
    options = PACKINGS["affine"]
    x, weight, a, b, dy = _drawn((9, 64), (40, 64), (64, 8), (8, 40), (9, 40))
    w, *stored = mx.quantize(weight, **options)

    def ours(scales: mx.array, biases: mx.array) -> list[mx.array]:
        return adapted_products(x, [AdaptedMatrix([w, scales, biases], a, b, Quantization(True, **options))], SCALE)

    found = mx.vjp(ours, stored, [dy])[1]
    expected = mx.vjp(lambda *stored: [x @ mx.dequantize(w, *stored, **options).T], stored, [dy])[1]
    for one, other in zip(found, expected, strict=True):
        assert mx.abs(other).max() > 0
        assert np.abs(as_float64(one) - as_float64(other)).max() <= 2.0**-7 * np.abs(as_float64(other)).max()


class _Layer(nn.Module):
    def __init__(self, rank: int = 8, dropout: float = 0.0, bias: bool = False, packing: str | None = None):
        super().__init__()
        linear = [nn.Linear(*sizes, bias=bias) for sizes in ((32, 64),) * 2 + ((64, 32),)]
        if packing:
            linear = [nn.QuantizedLinear.from_linear(each, **PACKINGS[packing]) for each in linear]
        self.gate_proj, self.up_proj, self.down_proj = (
            LoRALinear.from_base(each, rank, 2.0, dropout) for each in linear
        )
        for module in (self.gate_proj, self.up_proj, self.down_proj):
            module.freeze()
            module.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
            module.lora_b = mx.random.normal(module.lora_b.shape)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


def _loss_and_gradients(layer: nn.Module, x: mx.array):
    return nn.value_and_grad(layer, lambda layer, x: layer(x).astype(mx.float32).square().sum())(layer, x)


def _layer(**options) -> tuple[nn.Module, mx.array]:
    mx.random.seed(3)
    layer = _Layer(**options)
    for module in (layer.gate_proj, layer.up_proj, layer.down_proj):
        module.base.apply(lambda array: array.astype(mx.bfloat16) if array.dtype == mx.float32 else array)
    return layer, mx.random.normal((5, 16, 32)).astype(mx.bfloat16)


@pytest.mark.parametrize("packing", [None, "affine", "mxfp4"])
def test_projections_that_read_one_input_are_computed_together(packing, on_gpu):
    layer, x = _layer(packing=packing)
    expected = _loss_and_gradients(layer, x)
    mx.eval(expected)
    assert on_gpu.count("low_rank_rows") == 3
    assert on_gpu.count("low_rank_columns") == 3
    on_gpu.clear()
    with together(layer):
        found = _loss_and_gradients(layer, x)
        # A second call with another input computes anew.
        assert not mx.array_equal(layer(x * 2), layer(x))
    mx.eval(found)
    assert on_gpu.count("low_rank_columns") == 2
    assert on_gpu.count("low_rank_both") == 3
    assert abs(found[0].item() - expected[0].item()) <= 2.0**-7 * abs(expected[0].item())
    for name in ("gate_proj", "up_proj", "down_proj"):
        for factor in ("lora_a", "lora_b"):
            one, other = found[1][name][factor], expected[1][name][factor]
            assert np.abs(as_float64(one) - as_float64(other)).max() <= 2.0**-5 * np.abs(as_float64(other)).max()


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"bias": True}, {"bias": True, "packing": "affine"}], ids=str)
def test_other_layers_are_computed_alone(options, on_gpu):
    layer, x = _layer(**options)
    layer.eval()
    alone = layer(x)
    with together(layer):
        assert mx.array_equal(layer(x), alone)
