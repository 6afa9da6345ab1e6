"""Products that unpack the matrix first: values and gradients against float64, when they are used, and memory."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from deltatune.machine import backend
from deltatune.ops.cross_entropy import linear_cross_entropy
from deltatune.ops.products import quantized_product
from deltatune.ops.products.adapted_products import AdaptedMatrix, adapted_products
from deltatune.ops.products.quantized_product import Quantization, packed_product, serves, unpacked

PACKINGS = {
    **{f"affine{bits}": {"group_size": 32, "bits": bits, "mode": "affine"} for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
INPUTS, OUTPUTS = 96, 64
# Errors relative to the norm: those of fp32 sums, or of rounding the result (1.7e-3 in bf16), on a GPU the matrix too.
ROUNDINGS = 1 if backend.device() == "cpu" else 2
BOUND = {mx.float32: 1e-6, mx.float16: 2.5e-4 * ROUNDINGS, mx.bfloat16: 2e-3 * ROUNDINGS}


def quantized_matrix(packing, dtype=mx.float32, lead=()):
    matrix = mx.random.normal((*lead, OUTPUTS, INPUTS), key=mx.random.key(1)).astype(dtype)
    return list(mx.quantize(matrix, **packing))


def drawn(transpose, dtype=mx.float32, lead=(3, 11)):
    """Random x and a cotangent of y."""
    sizes = (INPUTS, OUTPUTS) if transpose else (OUTPUTS, INPUTS)
    return [mx.random.normal((*lead, n), key=mx.random.key(n)).astype(dtype) for n in sizes]


def product(x, arrays, packing, transpose=True):
    w, scales, *biases = arrays
    return packed_product(x, w, scales, biases[0] if biases else None, Quantization(transpose, **packing))


def exact(arrays, packing):
    w, *rest = (array.astype(mx.float32) if array.dtype in BOUND else array for array in arrays)
    return np.array(mx.dequantize(w, *rest, **packing, dtype=mx.float32), np.float64)


def relative_error(found, expected):
    return np.linalg.norm(np.array(found.astype(mx.float32)) - expected) / np.linalg.norm(expected)


@pytest.mark.skipif(backend.device() != "cpu", reason="a GPU has a kernel of its own")
@pytest.mark.parametrize("lead", [(), (3,)], ids=["a matrix", "experts"])
def test_numbers_are_those_of_mlx_bit_for_bit(lead):
    for packing in PACKINGS.values():
        for dtype in BOUND:
            arrays = quantized_matrix(packing, dtype, lead)
            for wanted in (dtype, mx.float32):
                found = unpacked(*arrays, dtype=wanted, **packing)
                assert found.dtype == wanted
                assert mx.array_equal(found, mx.dequantize(*arrays, dtype=wanted, **packing)), (packing, dtype, wanted)


@pytest.mark.parametrize("slabs", [1, 3], ids=["whole", "in slabs"])
@pytest.mark.parametrize("dtype", BOUND, ids=lambda d: str(d).split(".")[-1])
@pytest.mark.parametrize("transpose", [True, False], ids=["rows of in", "rows of out"])
@pytest.mark.parametrize("name", PACKINGS)
def test_value_and_gradient_against_float64(name, transpose, dtype, slabs, monkeypatch):
    if slabs > 1:
        size = 4 if backend.device() == "cpu" else dtype.size
        monkeypatch.setitem(quantized_product.SLAB_BYTES, backend.device(), size * INPUTS * (OUTPUTS // slabs))
    packing = PACKINGS[name]
    arrays, (x, dy) = quantized_matrix(packing, dtype), drawn(transpose, dtype)
    (y,), (dx,) = mx.vjp(lambda x: [product(x, arrays, packing, transpose)], [x], [dy])
    w = exact(arrays, packing)
    left, right = (w.T, w) if transpose else (w, w.T)
    wide, d = (np.array(array.astype(mx.float32), np.float64) for array in (x, dy))
    assert y.dtype == dx.dtype == dtype
    assert relative_error(y, wide @ left) < BOUND[dtype]
    assert relative_error(dx, d @ right) < BOUND[dtype]


@pytest.mark.parametrize("kind", [(mx.float32, mx.bfloat16), (mx.bfloat16, mx.float32)])
def test_dtypes_are_those_of_mlx(kind):
    packing = PACKINGS["affine4"]
    arrays, (x, _) = quantized_matrix(packing, kind[1]), drawn(True, kind[0])
    expected = mx.quantized_matmul(x, *arrays, **packing)
    found, dx = product(x, arrays, packing), mx.grad(lambda x: product(x, arrays, packing).sum())(x)
    assert found.dtype == expected.dtype == mx.float32
    assert dx.dtype == x.dtype


def test_a_matrix_for_each_head():
    packing, (x, dy) = PACKINGS["affine4"], drawn(True, lead=(2, 5, max(quantized_product.ROWS.values())))
    arrays = quantized_matrix(packing, lead=(5,))
    assert serves(x, *arrays[:2])
    (y,), (dx,) = mx.vjp(lambda x: [product(x, arrays, packing)], [x], [dy])
    w = exact(arrays, packing)
    assert relative_error(y, np.array(x, np.float64) @ w.swapaxes(-1, -2)) < 1e-6
    assert relative_error(dx, np.array(dy, np.float64) @ w) < 1e-6


def test_gradients_of_scales_and_biases_are_those_of_mlx():
    packing = PACKINGS["affine4"]
    (w, *rest), (x, dy) = quantized_matrix(packing), drawn(True)
    found = mx.vjp(lambda *rest: [product(x, [w, *rest], packing)], rest, [dy])[1]
    expected = mx.vjp(lambda *rest: [mx.quantized_matmul(x, w, *rest, **packing)], rest, [dy])[1]
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, np.array(theirs)) < 1e-5


def test_gradients_of_scales_do_not_close_over_the_rows(monkeypatch):
    """mx.vjp walks through all that a closed-over array was computed from: the whole step, for each product."""
    packing = PACKINGS["affine4"]
    arrays, (x, dy), differentiate, closed = quantized_matrix(packing), drawn(True), mx.vjp, []

    def watched(inner, primals, cotangents):
        closed.append([cell.cell_contents for cell in inner.__closure__ or ()])
        return differentiate(inner, primals, cotangents)

    monkeypatch.setattr(mx, "vjp", watched)
    differentiate(lambda x: [product(x, arrays, packing)], [x], [dy])
    shapes = [item.shape for cells in closed for item in cells if isinstance(item, mx.array)]
    assert closed
    assert x.shape not in shapes


def test_compiled_checkpointed_and_twice_differentiated():
    packing, (x, _) = PACKINGS["affine4"], drawn(True)
    arrays = quantized_matrix(packing)

    def loss(x):
        return cubed(product(x, arrays, packing))

    def cubed(y):
        return (y * y * y).sum()

    plain = mx.grad(loss)(x)
    for form in (mx.compile(mx.grad(loss)), mx.grad(mx.checkpoint(loss))):
        assert relative_error(form(x), np.array(plain)) < 1e-5
    matrix = mx.dequantize(*arrays, **packing)
    second = mx.grad(lambda x: mx.grad(loss)(x).square().sum())(x)
    expected = mx.grad(lambda x: mx.grad(lambda x: cubed(x @ matrix.T))(x).square().sum())(x)
    assert relative_error(second, np.array(expected)) < 1e-5


def test_when_the_product_is_used(monkeypatch):
    matrix, heads = ([mx.zeros((*lead, 8, 8), mx.uint32), mx.zeros((*lead, 8, 2))] for lead in ((), (3,)))
    one_group = [mx.zeros((8, 8), mx.uint32), mx.zeros((8, 1))]
    for device, least in quantized_product.ROWS.items():
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        assert serves(mx.zeros((2, least // 2, 64)), *matrix)
        assert not serves(mx.zeros((1, least - 1, 64)), *matrix)
        assert serves(mx.zeros((2, 3, least, 64)), *heads)
        assert not serves(mx.zeros((3, least - 1, 64)), *heads)
        assert not serves(mx.zeros((least, 64)), *heads)
        assert not serves(mx.zeros((1, least, 64)), *heads)
        assert not serves(mx.zeros((2, least, 64), mx.int32), *matrix)
        assert not serves(mx.zeros(64), *matrix)
        assert not serves(mx.zeros((0, 64)), *matrix)
        assert serves(mx.zeros((1, 64)), *one_group) == (device == "cuda")
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    for inputs, outputs, rows in ((4096, 12288, 8), (1024, 248320, 8), (1024, 3584, 28), (1024, 2048, 48)):
        large = mx.zeros((outputs, inputs // 8), mx.uint32), mx.zeros((outputs, inputs // 64))
        assert serves(mx.zeros((rows, 1, inputs)), *large)
        assert not serves(mx.zeros((rows - 1, 1, inputs)), *large)
    monkeypatch.setattr(backend, "device", lambda: "metal")
    assert not serves(mx.zeros((1000, 64)), *matrix)
    assert not serves(mx.zeros((2, 64)), *one_group)


class Head(nn.Module):
    """A quantised head, which is multiplied as the patch of mx.quantized_matmul does it."""

    def __init__(self, packing, dtype=mx.float32):
        super().__init__()
        self.packing, (self.weight, self.scales, *biases) = packing, quantized_matrix(packing, dtype)
        self.biases = biases[0] if biases else None
        self.freeze()

    def __call__(self, x):
        arrays = [array for array in (self.weight, self.scales, self.biases) if array is not None]
        return product(x, arrays, self.packing)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", ["affine4", "mxfp4"])
def test_the_loss_unpacks_a_head_once(name, training, monkeypatch):
    """The chunks of rows meet the same unpacked matrix, and the gradients are those of a dense head."""
    calls, head = [], Head(PACKINGS[name]).train(training)
    hidden = mx.random.normal((300, INPUTS), key=mx.random.key(4))
    targets, weights = mx.random.randint(0, OUTPUTS, (300,), key=mx.random.key(5)), mx.ones(300)
    dense = nn.Linear(INPUTS, OUTPUTS, bias=False).freeze()
    dense.weight = mx.dequantize(
        *[a for a in (head.weight, head.scales, head.biases) if a is not None], **PACKINGS[name]
    )

    def both(head):
        def loss(hidden):
            return linear_cross_entropy(head, hidden, targets, weights, chunk_tokens=100)[0]

        return mx.value_and_grad(loss)(hidden)

    expected = both(dense)
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(quantized_product, "unpacked", lambda *a, **b: calls.append(a) or unpacked(*a, **b))
    for _ in range(2):
        calls.clear()
        found = both(head)
        # Without training mode, the value and the gradient are computed apart.
        assert len(calls) == (1 if training else 2)
        for one, other in zip(found, expected, strict=True):
            assert relative_error(one, np.array(other.astype(mx.float32))) < 1e-5
    head(hidden)
    head(hidden)
    assert len(calls) == (3 if training else 4)


def test_a_matrix_that_is_kept_is_rounded_to_the_dtype_of_the_product(monkeypatch):
    head, x = Head(PACKINGS["affine4"], mx.bfloat16), drawn(True)[0]
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    with quantized_product.unpacked_once(head):
        outputs = [head(x), head(x.astype(mx.bfloat16)), head(x)]
    assert [y.dtype for y in outputs] == [mx.float32, mx.bfloat16, mx.float32]
    exactly = np.array(x, np.float64) @ exact([head.weight, head.scales, head.biases], PACKINGS["affine4"]).T
    assert relative_error(outputs[0], exactly) < 1e-6
    assert relative_error(outputs[2], exactly) < 1e-6
    assert relative_error(outputs[1], exactly) < 1e-2


@pytest.mark.parametrize("whole", [True, False])
def test_a_matrix_that_is_large_for_the_gpu_is_unpacked_in_slabs_each_time(whole, monkeypatch):
    head, x, calls = Head(PACKINGS["affine4"], mx.bfloat16), drawn(True)[0], []
    size = 2 * INPUTS * OUTPUTS
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(backend, "gpu_memory", lambda: 32 * size - int(not whole))
    monkeypatch.setattr(quantized_product, "unpacked", lambda *a, **b: calls.append(a) or unpacked(*a, **b))
    with quantized_product.unpacked_once(head):
        first, second = head(x.astype(mx.bfloat16)), head(x.astype(mx.bfloat16))
    assert len(calls) == (1 if whole else 2)
    assert mx.array_equal(first, second)


def test_a_matrix_with_trained_scales_is_not_kept(monkeypatch):
    head, calls = Head(PACKINGS["affine4"]), []
    head.unfreeze(keys=["scales"])
    x = mx.random.normal((100, INPUTS), key=mx.random.key(4))

    def squared(head, x):
        with quantized_product.unpacked_once(head):
            return (head(x) * head(2 * x)).sum()

    expected = nn.value_and_grad(head, squared)(head, x)[1]["scales"]
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(quantized_product, "unpacked", lambda *a, **b: calls.append(a) or unpacked(*a, **b))
    found = nn.value_and_grad(head, squared)(head, x)[1]["scales"]
    assert relative_error(found, np.array(expected)) < 1e-5
    assert mx.abs(expected).max() > 0
    assert len(calls) >= 2


def adapted(x, arrays, packing):
    """The product, with an adapter that has parts of the scales as factors."""
    a, b = arrays[1][:, :8], arrays[2][:, :8].T
    return adapted_products(x, [AdaptedMatrix(arrays, a, b, Quantization(True, **packing))], 0.01)[0]


@pytest.mark.skipif(backend.device() != "cpu", reason="counts a CPU's memory")
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "as it is"])
@pytest.mark.parametrize("of_layer", [product, adapted])
def test_more_layers_need_no_more_memory_for_unpacked_matrices(of_layer, compiled, peak_bytes):
    """mx.compile computes equal things once: it would keep the matrices of the forward pass for the backward pass."""
    width, packing = 512, PACKINGS["affine4"]
    matrices = [mx.quantize(mx.random.normal((width, width)) * 0.05, **packing) for _ in range(12)]
    x = mx.random.normal((16, width))
    mx.eval(x, matrices)

    def peak(count):
        def loss(x):
            for arrays in matrices[:count]:
                x = mx.tanh(of_layer(x, list(arrays), packing))
            return x.sum()

        gradient = mx.compile(mx.grad(loss)) if compiled else mx.grad(loss)
        mx.eval(gradient(x))
        return peak_bytes(lambda: gradient(x))

    assert peak(12) - peak(4) < 4 * width * width * 4
