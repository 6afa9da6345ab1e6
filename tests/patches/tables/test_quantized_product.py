"""The replaced mx.quantized_matmul unpacks for many rows only, and every layer computes the same with it."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from deltatune.lora import DoRALinear, LoRALinear
from deltatune.machine import backend
from deltatune.ops.products import quantized_product
from deltatune.patches import PatchWarning, patched
from deltatune.patches.tables import products as patch

pytestmark = pytest.mark.skipif(backend.device() not in quantized_product.ROWS, reason="Metal has products of its own")


@pytest.fixture
def calls(monkeypatch):
    """The number of rows of each call that was unpacked, without the calls of the patch's own check."""
    found = []

    def counted(x, *rest):
        rows = x.size // x.shape[-1]
        found.extend([rows] if rows != max(quantized_product.ROWS.values()) else [])
        return quantized_product.packed_product(x, *rest)

    monkeypatch.setattr(patch, "packed_product", counted)
    return found


def layers():
    """Layers of a quantised model: a linear one, plain and with adapters, and an embedding that serves as the head."""
    mx.random.seed(0)
    plain, lora, dora = (nn.QuantizedLinear(128, 96, group_size=32, bits=4) for _ in range(3))
    lora, dora = LoRALinear.from_base(lora, rank=4), DoRALinear.from_base(dora, rank=4)
    lora.lora_b = mx.random.normal(lora.lora_b.shape)
    table = nn.QuantizedEmbedding(96, 128, group_size=32, bits=4)
    return [plain, lora, dora, table.as_linear]


def test_every_layer_computes_the_same(calls):
    x = mx.random.normal((2, 70, 128))
    each = layers()

    def results():
        found = [layer(x) for layer in each]
        return found + [mx.grad(lambda x, layer=layer: layer(x).square().sum())(x) for layer in each]

    wanted = results()
    mx.eval(wanted)
    assert not calls
    with patched() as report:
        assert "quantized_matmul" in str(report)
        assert not report.left_alone
        found = results()
        mx.eval(found)
    assert calls == [140] * 8
    for one, other in zip(found, wanted, strict=True):
        assert mx.abs(one - other).max() < 1e-5 * mx.abs(other).max()
    results()
    assert len(calls) == 8


def test_few_rows_and_streams_are_upstreams(calls):
    linear = layers()[0]
    arrays = [linear.weight, linear.scales, linear.biases]
    with patched():
        linear(mx.zeros((1, 1, 128)))
        mx.quantized_matmul(mx.zeros((1000, 128)), *arrays, group_size=32, bits=4, stream=mx.default_stream(mx.cpu))
        assert not calls
        mx.quantized_matmul(mx.zeros((1000, 96)), *arrays, False, 32, 4, "affine")
    assert calls == [1000]


def test_bad_shapes_are_refused_as_upstream_does():
    linear = layers()[0]
    with patched(), pytest.raises(ValueError, match=r"\[(matmul|quantized_matmul)\]"):
        linear(mx.zeros((70, 64)))


def test_one_that_computes_something_else_is_not_used(monkeypatch, asked_anew):
    monkeypatch.setattr(patch, "packed_product", lambda x, *rest: quantized_product.packed_product(x, *rest) * 1.001)
    with pytest.warns(PatchWarning, match="quantized_matmul.*differs from the unpacked product"), patched() as report:
        assert report.left_alone
