"""Linear layers with LoRA that read one input, by kernels on the host machine, against float64."""

from collections import Counter
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


PACKINGS = {
    "affine": {"group_size": 32, "bits": 4, "mode": "affine"},
    "affine, in slabs": {"group_size": 32, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}
# The adapters' outputs and their rank: those that the kernels take together, and those that they take one by one. Of
# packed layers the second is dense.
CASES = [([64], 8, None), ([64, 40, 16], 8, None), ([64, 40], 4, None), ([64, 40, 16], 32, None)]
CASES += [([40] * 3, 8, packing) for packing in PACKINGS]


@pytest.mark.parametrize(("sizes", "rank", "packing"), CASES, ids=str)
def test_layers_and_their_gradients_against_float64(sizes, rank, packing, on_gpu, monkeypatch):
    """In slabs, a matrix is unpacked 16 rows at a time."""
    if packing == "affine, in slabs":
        monkeypatch.setitem(quantized_product.SLAB_BYTES, "cuda", 16 * 64 * 2)
    count, options = len(sizes), PACKINGS.get(packing)
    x, *rest = _drawn((2, 9, 64), *(shape for n in sizes for shape in ((n, 64), (64, rank), (rank, n), (2, 9, n))))
    factors, cotangents = list(zip(rest[1::4], rest[2::4], strict=True)), rest[3::4]
    kinds = [Quantization(True, **options) if packing and at != 1 else None for at in range(count)]
    weights = [mx.quantize(w, **options) if kind else [w] for w, kind in zip(rest[::4], kinds, strict=True)]
    dense = [mx.dequantize(*w, **options) if kind else w[0] for w, kind in zip(weights, kinds, strict=True)]

    def function(x: mx.array, *arrays: mx.array) -> list[mx.array]:
        given = iter(arrays)
        return adapted_products(
            x,
            [
                AdaptedMatrix(list(weight) if kind else [next(given)], next(given), next(given), kind)
                for weight, kind in zip(weights, kinds, strict=True)
            ],
            SCALE,
        )

    # A packed weight has no gradient.
    flat = [
        array
        for weight, pair, kind in zip(weights, factors, kinds, strict=True)
        for array in ([] if kind else weight) + [*pair]
    ]
    outputs, gradients = mx.vjp(function, [x, *flat], cotangents)
    mx.eval(outputs, gradients)
    once = 1 if count == 1 or rank == 8 else count
    assert Counter(on_gpu) == {
        f"low_rank_{name}": times
        for name, times in {"rows": once, "wide": count + once, "both": count, "columns": once}.items()
    }
    layers = [list(map(as_float64, (weight, *pair))) for weight, pair in zip(dense, factors, strict=True)]
    exact, expected = _gradients(as_float64(x), layers, list(map(as_float64, cotangents)))
    expected = [gradient for at, gradient in enumerate(expected) if at % 3 != 1 or kinds[at // 3] is None]
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
