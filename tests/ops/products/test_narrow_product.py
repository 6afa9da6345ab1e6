"""Products in 16 bits on a CPU are those of float64, rounded once, forward and backward."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from deltatune.lora import DoRALinear, LoRALinear
from deltatune.machine import backend
from deltatune.ops.operator.measure import ROUNDING, as_float64, largest_error, poison
from deltatune.ops.products import quantized_product
from deltatune.ops.products.quantized_product import dense_product, narrow_product, serves_narrow
from deltatune.patches import patched
from deltatune.patches.tables import products

pytestmark = pytest.mark.skipif(backend.device() != "cpu", reason="GPUs have products in 16 bits")
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}
INPUTS, OUTPUTS = 70, 33


def drawn(*shape, dtype):
    return mx.array(np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("slab_bytes", [2**25, 4 * INPUTS * 10], ids=["one slab", "four slabs"])
@pytest.mark.parametrize("name", DTYPES)
def test_product_and_gradients_are_those_of_float64(name, slab_bytes, monkeypatch):
    monkeypatch.setitem(quantized_product.SLAB_BYTES, "cpu", slab_bytes)
    dtype = DTYPES[name]
    x, weight, dy = (drawn(*shape, dtype=dtype) for shape in ((2, 5, INPUTS), (OUTPUTS, INPUTS), (2, 5, OUTPUTS)))
    poison([x, weight, dy])
    (y,), (dx, d_weight) = mx.vjp(narrow_product, [x, weight], [dy])
    rows, matrix, cotangents = (as_float64(array) for array in (x, weight, dy))
    truth = [rows @ matrix.T, cotangents @ matrix, np.einsum("bto,bti->oi", cotangents, rows)]
    assert {array.dtype for array in (y, dx, d_weight)} == {dtype}
    # A sum of K products in fp32 is off by about sqrt(K) roundings.
    assert largest_error([y, dx, d_weight], truth) <= ROUNDING[name] + INPUTS**0.5 * 2.0**-24


def test_which_products_it_serves():
    row, rows, weight = (mx.zeros(shape, mx.bfloat16) for shape in ((1, 1, 8), (1, 2, 8), (3, 8)))
    assert serves_narrow(rows, weight)
    assert not serves_narrow(row, weight)
    assert not serves_narrow(rows.astype(mx.float32), weight)
    assert not serves_narrow(rows, weight.astype(mx.float32))
    assert mx.array_equal(dense_product(row, weight), row @ weight.T)


@pytest.fixture
def rows_served(monkeypatch):
    """The number of rows of each product that the patches serve."""
    found = []

    def counted(x, weight):
        found.append(x.size // x.shape[-1])
        return narrow_product(x, weight)

    monkeypatch.setattr(products, "narrow_product", counted)
    return found


def test_layers_and_heads_compute_the_same(rows_served):
    mx.random.seed(0)
    plain, biased, lora, dora = (nn.Linear(INPUTS, OUTPUTS, bias=bias) for bias in (False, True, False, False))
    table = nn.Embedding(OUTPUTS, INPUTS)
    for layer in (plain, biased, lora, dora, table):
        layer.set_dtype(mx.bfloat16)
    layers = [plain, biased, LoRALinear.from_base(lora, rank=4), DoRALinear.from_base(dora, rank=4)]
    layers.append(lambda x: table.as_linear(x))
    x = drawn(2, 5, INPUTS, dtype=mx.bfloat16)

    def results():
        return [layer(x) for layer in layers] + [
            mx.grad(lambda x, layer=layer: layer(x).astype(mx.float32).square().sum())(x) for layer in layers
        ]

    expected = results()
    mx.eval(expected)
    with patched() as report:
        assert not report.left_alone
        rows_served.clear()
        found = results()
        mx.eval(found)
        assert rows_served == [10] * 8
    # MLX and these products round the same results, so that they differ by two units in the last place at most; a
    # gradient passes two products more.
    assert largest_error(found, [as_float64(each) for each in expected]) <= 6 * ROUNDING["bfloat16"]
