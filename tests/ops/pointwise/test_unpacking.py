"""Unpacking, on the host machine or a GPU, against float64 rounded once; its gradients; and when it is used."""

import mlx.core as mx
import numpy as np
import pytest
from host_machine import HostMachine, defects, plant

from deltatune.ops import functional
from deltatune.ops.kernels.launch import header, on
from deltatune.ops.pointwise import unpacking
from deltatune.ops.pointwise.passes import BODIES
from deltatune.ops.pointwise.unpacking import unpack
from deltatune.ops.products.quantized_product import Quantization, packed_product, unpacked

DTYPES = [mx.float32, mx.bfloat16, mx.float16]
# The share of a number by which it may be off: one rounding, and those of the product and the sum in fp32.
ROUNDING = {mx.float32: 2.0**-23, mx.float16: 2.0**-11 + 2.0**-22, mx.bfloat16: 2.0**-8 + 2.0**-22}


def random_matrix(shape=(5, 256), group_size=64, bits=4, dtype=mx.bfloat16):
    """Words, scales and biases of normal numbers; every number of the words is drawn evenly."""
    *lead, inputs = shape
    draw = np.random.default_rng(bits)
    words = mx.array(draw.integers(0, 2**32, (*lead, inputs * bits // 32), np.uint32))
    stored = draw.normal(size=(2, *lead, inputs // group_size)).astype(np.float32)
    return [words, *(mx.array(array).astype(dtype) for array in stored)]


def exactly(w, scales, biases, group_size, bits):
    """The numbers by the definition of the layout: bit after bit, from the lowest of each word on."""
    stream = np.unpackbits(np.array(w).view(np.uint8), axis=-1, bitorder="little")
    q = (stream.reshape(*w.shape[:-1], -1, bits) * 2.0 ** np.arange(bits)).sum(axis=-1)
    scales, biases = (
        np.repeat(np.array(array.astype(mx.float32), np.float64), group_size, -1) for array in (scales, biases)
    )
    return scales * q, biases


def check(arrays, group_size, bits, dtype, execute):
    with on(execute):
        found = unpack(arrays, group_size, bits, dtype)
    products, biases = exactly(*arrays, group_size, bits)
    assert found.dtype == dtype
    assert found.shape == products.shape
    error = np.abs(np.array(found.astype(mx.float32)) - (products + biases))
    # The product and the sum are rounded in fp32, which shows where the two cancel.
    bound = ROUNDING[dtype] * np.abs(products + biases) + 2.0**-23 * np.abs(products)
    assert (error <= bound + 2.0**-24).all()


# Of three sizes of groups one for each number of bits daily, by turns.
LAYOUTS = [
    pytest.param(bits, size, marks=[pytest.mark.weekly] * ((i + j) % 3 > 0))
    for i, bits in enumerate(unpacking.BITS)
    for j, size in enumerate(unpacking.GROUP_SIZES)
]


@pytest.mark.parametrize(("bits", "group_size"), LAYOUTS)
def test_every_layout_against_float64(bits, group_size, execute):
    arrays = random_matrix((5, 384), group_size, bits)
    check(arrays, group_size, bits, mx.bfloat16, execute)
    expected = mx.dequantize(
        *(array.astype(mx.float32) if i else array for i, array in enumerate(arrays)), group_size, bits
    )
    found = unpack(arrays, group_size, bits, mx.float32)
    assert mx.allclose(found, expected, rtol=0, atol=2.0**-22 * mx.abs(expected).max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_every_dtype_against_float64(stored, dtype, execute):
    bits = 4 if stored == dtype else 8
    check(random_matrix(dtype=stored, bits=bits), 64, bits, dtype, execute)


@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 192), (2, 3, 2, 64), (16, 64), (17, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("bits", [3, 4])
def test_every_shape_against_float64(shape, bits, execute):
    check(random_matrix(shape, bits=bits), 64, bits, mx.bfloat16, execute)


def check_two_layouts(execute):
    for bits in (4, 5):
        check(random_matrix(bits=bits), 64, bits, mx.bfloat16, execute)


DEFECTS = defects("unpacking")


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_shows(defect, host_folder):
    machine = HostMachine(host_folder, plant(header("metal", BODIES), *DEFECTS[defect]))
    with pytest.raises(AssertionError):
        check_two_layouts(machine.run)


def test_gradients_are_those_of_mlx(execute):
    w, *stored = random_matrix(dtype=mx.float32)
    d = mx.random.normal((5, 256), key=mx.random.key(1))
    found = mx.vjp(lambda *stored: [unpack([w, *stored], 64, 4, mx.float32)], stored, [d])[1]
    expected = mx.vjp(lambda *stored: [mx.dequantize(w, *stored, 64, 4)], stored, [d])[1]
    assert all(mx.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.fixture
def on_gpu(monkeypatch, pretend_gpu, execute):
    """The names of the launches of code that believes to run on an NVIDIA GPU; the host machine runs them."""
    monkeypatch.setattr(unpacking, "LEAST", 0)
    names = pretend_gpu(execute)
    with on(None):
        yield names


def test_a_product_and_its_gradients_in_a_training_step(on_gpu):
    """The products unpack with the kernel; the gradients of scales and biases are still those of MLX."""
    (w, *stored), x = random_matrix(dtype=mx.float32), mx.random.normal((70, 256), key=mx.random.key(2))
    dy = mx.random.normal((70, 5), key=mx.random.key(3))
    quantization = Quantization(True, 64, 4, "affine")
    with functional.differentiated_once():
        found = mx.vjp(lambda x, *stored: [packed_product(x, w, *stored, quantization)], [x, *stored], [dy])
    assert on_gpu == ["unpacked_groups"] * 2
    expected = mx.vjp(lambda x, *stored: [x @ mx.dequantize(w, *stored, 64, 4).T], [x, *stored], [dy])
    for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert mx.allclose(one, other, rtol=1e-5, atol=1e-5 * mx.abs(other).max().item())


def test_a_product_is_differentiated_twice(on_gpu):
    (w, *stored), x = random_matrix(dtype=mx.float32), mx.random.normal((70, 256), key=mx.random.key(2))

    def squared(product):
        def loss(x, scales, biases):
            return product(x, scales, biases).square().sum()

        return mx.grad(lambda *arrays: mx.grad(loss)(*arrays).square().sum(), argnums=(0, 1, 2))(x, *stored)

    found = squared(lambda x, *stored: packed_product(x, w, *stored, Quantization(True, 64, 4, "affine")))
    expected = squared(lambda x, *stored: x @ mx.dequantize(w, *stored, 64, 4).T)
    assert on_gpu
    for one, other in zip(found, expected, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-5 * mx.abs(other).max().item())


def test_other_packings_are_left_to_mlx(on_gpu):
    matrix = mx.random.normal((64, 128), key=mx.random.key(0))
    packed = mx.quantize(matrix, group_size=32, bits=4, mode="mxfp4")
    for dtype in (None, mx.float32):
        expected = mx.dequantize(*packed, group_size=32, bits=4, mode="mxfp4", dtype=dtype)
        found = unpacked(*packed, dtype=dtype, group_size=32, bits=4, mode="mxfp4")
        assert found.dtype == expected.dtype
        assert mx.array_equal(found, expected)
    assert not on_gpu
