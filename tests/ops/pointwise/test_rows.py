"""Taking and summing rows, on the host machine or a GPU, against MLX's operations; and when the kernels are used."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.kernels.launch import on
from deltatune.ops.pointwise.rows import sum_rows, take_rows
from two_dtypes import in_two_dtypes

DTYPES = [mx.float32, mx.bfloat16, mx.float16]
ROUNDING = {mx.float32: 2.0**-22, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def random_case(dtype, tokens=37, k=3, width=40):
    x = mx.random.normal((tokens * k, width), key=mx.random.key(0)).astype(dtype)
    weights = mx.random.normal((tokens, k), key=mx.random.key(1))
    order = mx.argsort(mx.random.normal((tokens * k,), key=mx.random.key(2)))
    return x, weights, order


@pytest.mark.parametrize("kind", [mx.int32, mx.uint32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_taken_by_index(dtype, kind, execute):
    x, _, order = random_case(dtype)
    for index in (order, order[:5], mx.concatenate([order, order]), mx.array([110, 0, 0])):
        found = take_rows(x, index.astype(kind))
        assert found.dtype == dtype
        assert mx.array_equal(found, x[index])
    below = take_rows(x, mx.array([-1, 3, -111]).astype(mx.int32))
    assert mx.array_equal(below, x[mx.array([110, 3, 0])])


@pytest.mark.parametrize("kind", [mx.int64, mx.uint8], ids=str)
def test_the_kernel_reads_integers_of_32_bits(kind):
    """NumPy's integers have 64, which no kernel takes."""
    given = []

    def execute(launched):
        given.append(launched.inputs["index"].dtype)
        return [mx.zeros((2, 24))]

    with on(execute):
        take_rows(mx.zeros((11, 24)), mx.array([3, 1]).astype(kind))
    assert given == [mx.int32]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("result", [None, mx.float32])
@pytest.mark.parametrize(("k", "dtype"), in_two_dtypes([1, 2, 3]))
def test_sums_of_rows_against_float64(dtype, k, result, weighted, execute):
    x, weights, order = random_case(dtype, k=k)
    index = order.reshape(-1, k)
    found = sum_rows(x, index, weights if weighted else None, result)
    wide = np.array(x.astype(mx.float32), np.float64)[np.array(index)]
    expected = (wide * np.array(weights, np.float64)[..., None] if weighted else wide).sum(axis=1)
    assert found.dtype == (result or dtype)
    error = np.abs(np.array(found.astype(mx.float32)) - expected).max() / np.abs(expected).max()
    assert error < ROUNDING[result or dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_the_kernels_mlx_gives_the_same(dtype):
    x, weights, order = random_case(dtype)
    assert mx.array_equal(take_rows(x, order), x[order])
    found = sum_rows(x, order.reshape(-1, 3), weights)
    assert found.dtype == dtype
    terms = x[order].reshape(-1, 3, 40).astype(mx.float32) * weights[..., None]
    assert mx.abs(found.astype(mx.float32) - terms.sum(axis=1)).max() < 4 * ROUNDING[dtype] * mx.abs(terms).max()
