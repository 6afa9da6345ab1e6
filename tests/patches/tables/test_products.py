"""Replaced products are right over faults of MLX's, compute the same unpacked, and no gaps are left after loading."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from deltatune import patches, upstream
from deltatune.lora import DoRALinear, LoRALinear
from deltatune.machine import backend, compiling
from deltatune.ops.products import quantized_product
from deltatune.patches import PatchWarning, patched
from deltatune.patches.tables import products
from deltatune.patches.tables.products import _gather_mm, _reads_right_rows
from layouts import has_gaps, row_distance

# The tuple hides the function from the patches, which would replace it in this module too.
UPSTREAM = (mx.gather_mm,)
EXPERTS = mx.array([0, 0, 1, 1, 1, 3, 3, 3], mx.uint32)


def misread(x, experts):
    """The fault's reads from x [R, 1, K]: an expert's rows follow its first at the stride of the axis of length 1.

    Rows that would lie outside x are NaN.
    """
    distance, size = row_distance(x), x.shape[-1]
    flat, numbers = np.array(x).reshape(-1), np.array(experts)
    found = np.full((len(numbers), size), np.nan, np.float32)
    for row, expert in enumerate(numbers):
        first = int(np.argmax(numbers == expert))
        start = first * size + (row - first) * distance
        if start + size <= flat.size:
            found[row] = flat[start : start + size]
    return mx.array(found)[:, None]


def faulty(a, b, lhs_indices=None, rhs_indices=None, *, sorted_indices=False):
    """mx.gather_mm with that fault, also in the gradient of a."""
    if not sorted_indices:
        return UPSTREAM[0](a, b, lhs_indices, rhs_indices)

    def product(rows, matrices):
        return UPSTREAM[0](misread(rows, rhs_indices), matrices, rhs_indices=rhs_indices)

    function = mx.custom_function(product)
    function.vjp(lambda primals, dy, _: [product(dy, primals[1].swapaxes(-1, -2)), mx.zeros_like(primals[1])])
    return function(a, b)


def test_the_stand_in_has_the_fault():
    x = mx.random.normal((8, 1, 16))
    assert mx.array_equal(misread(x, EXPERTS), x)
    assert not mx.array_equal(misread(mx.expand_dims(x[:, 0], -2) * 2, EXPERTS), x * 2)
    assert "differs from the elementwise product" in _reads_right_rows(mx.gather_mm, faulty)


def test_the_replacement_reads_the_right_rows_forward_and_backward():
    assert _reads_right_rows(faulty, _gather_mm(faulty)) is None


@pytest.mark.parametrize("rows", [1, 2])
def test_other_calls_are_upstreams(rows):
    x, matrices = mx.random.normal((8, rows, 16)), mx.random.normal((4, 16, 8))
    ours = _gather_mm(mx.gather_mm)
    expected = mx.gather_mm(x, matrices, rhs_indices=EXPERTS)
    for found in (
        ours(x, matrices, rhs_indices=EXPERTS),
        ours(x, matrices, None, EXPERTS, sorted_indices=rows == 2),
        ours(x, matrices, mx.arange(8), EXPERTS, stream=mx.cpu),
    ):
        assert mx.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "cuda", "metal"])
def test_it_is_applied_on_gpus(device, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(patches, "ON_CUDA", [each for each in patches.ON_CUDA if each in products.SORTED_ROWS])
    own = mx.gather_mm
    with patched() as report:
        assert report.complete
        assert (mx.gather_mm is own) == (device == "cpu")
    assert mx.gather_mm is own


class Activation(nn.Module):
    """mlx-lm's SwiGLU, but compiled anew for each instance, and so in the mode of its first call."""

    def __init__(self):
        super().__init__()
        self._swiglu = mx.compile(lambda x, gate: nn.silu(gate) * x, shapeless=True)

    def __call__(self, x, gate):
        return self._swiglu(x, gate)


@pytest.mark.skipif(upstream.set_no_fuse() is None, reason="this MLX cannot compile without kernels")
@pytest.mark.parametrize("mended", [False, True])
def test_upstreams_experts_answer_without_kernels(mended, monkeypatch):
    """40 tokens of a prompt go through mlx-lm's layer; its unfused activation leaves a stride of 0."""
    record = replace(
        products.SORTED_ROWS[0], check=None, replacement=lambda _: _gather_mm(faulty) if mended else faulty
    )
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(patches, "ON_CUDA", [record])
    mx.random.seed(0)
    layer = SwitchGLU(32, 64, 4, Activation())
    layer.eval()
    x, indices = mx.random.normal((1, 40, 32)), mx.random.randint(0, 4, (1, 40, 2))
    with compiling.without_kernels(), patched():
        found = layer(x, indices)
        mx.eval(found)
    up, gate, down = (layer[name].weight[indices] for name in ("up_proj", "gate_proj", "down_proj"))
    hidden = [(x[:, :, None, None] * matrices).sum(-1) for matrices in (up, gate)]
    hidden = hidden[1] * mx.sigmoid(hidden[1]) * hidden[0]
    expected = (hidden[:, :, :, None] * down).sum(-1)
    assert (float(mx.abs(found - expected).max()) < 1e-5 * float(mx.abs(expected).max())) == mended


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (SwitchLinear(8, 5, 3, bias=False) for _ in range(2))
        self.norm = nn.RMSNorm(8)


@pytest.fixture
def halves():
    """Weights with gate and up as slices of one array, as mlx-lm's sanitize makes them."""
    both = mx.random.normal((3, 10, 8))
    mx.eval(both)
    return [("gate.weight", both[:, :5]), ("up.weight", both[:, 5:]), ("norm.weight", mx.ones(8))]


@pytest.mark.any_blas
@pytest.mark.parametrize(("device", "expected"), [("cpu", [True, True]), ("cuda", [False, False])])
def test_slices_are_copied_on_cuda(device, expected, halves, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(patches, "ON_CUDA", products.WITHOUT_GAPS)
    model = Model()
    with patched() as report:
        model.load_weights(halves)
    assert report.complete
    assert [has_gaps(model.gate.weight), has_gaps(model.up.weight)] == expected
    assert mx.array_equal(model.gate.weight, halves[0][1])
    assert mx.array_equal(model.up.weight, halves[1][1])


@pytest.mark.any_blas
def test_files_and_strictness_are_upstreams(halves, tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(patches, "ON_CUDA", products.WITHOUT_GAPS)
    mx.save_safetensors(str(tmp_path / "w.safetensors"), dict(halves))
    with patched():
        assert mx.array_equal(Model().load_weights(str(tmp_path / "w.safetensors")).up.weight, halves[1][1])
        with pytest.raises(ValueError, match="Missing 1 parameters"):
            Model().load_weights(halves[:2])
        Model().load_weights(halves[:2], strict=False)


unpacking = pytest.mark.skipif(backend.device() not in quantized_product.ROWS, reason="Metal has products of its own")


@pytest.fixture
def calls(monkeypatch):
    """The number of rows of each call that was unpacked, without the calls of the patch's own check."""
    found = []

    def counted(x, *rest):
        rows = x.size // x.shape[-1]
        found.extend([rows] if rows != max(quantized_product.ROWS.values()) else [])
        return quantized_product.packed_product(x, *rest)

    monkeypatch.setattr(products, "packed_product", counted)
    return found


def layers():
    """Layers of a quantised model: a linear one, plain and with adapters, and an embedding that serves as the head."""
    mx.random.seed(0)
    plain, lora, dora = (nn.QuantizedLinear(128, 96, group_size=32, bits=4) for _ in range(3))
    lora, dora = LoRALinear.from_base(lora, rank=4), DoRALinear.from_base(dora, rank=4)
    lora.lora_b = mx.random.normal(lora.lora_b.shape)
    table = nn.QuantizedEmbedding(96, 128, group_size=32, bits=4)
    return [plain, lora, dora, table.as_linear]


@unpacking
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


@unpacking
def test_few_rows_and_streams_are_upstreams(calls):
    linear = layers()[0]
    arrays = [linear.weight, linear.scales, linear.biases]
    with patched():
        linear(mx.zeros((1, 1, 128)))
        mx.quantized_matmul(mx.zeros((1000, 128)), *arrays, group_size=32, bits=4, stream=mx.default_stream(mx.cpu))
        assert not calls
        mx.quantized_matmul(mx.zeros((1000, 96)), *arrays, False, 32, 4, "affine")
    assert calls == [1000]


@unpacking
def test_bad_shapes_are_refused_as_upstream_does():
    linear = layers()[0]
    with patched(), pytest.raises(ValueError, match=r"\[(matmul|quantized_matmul)\]"):
        linear(mx.zeros((70, 64)))


@unpacking
def test_one_that_computes_something_else_is_not_used(monkeypatch, asked_anew):
    monkeypatch.setattr(products, "packed_product", lambda x, *rest: quantized_product.packed_product(x, *rest) * 1.001)
    with pytest.warns(PatchWarning, match="quantized_matmul.*differs from the unpacked product"), patched() as report:
        assert report.left_alone
