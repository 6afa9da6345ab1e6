"""The gradients of experts' activations and scores in one pass, on the host machine or a GPU, against float64."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.operator.measure import relative_error
from deltatune.ops.pointwise import scored_swiglu

ROUNDING = {mx.float32: 2.0**-22, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def random_arrays(dtype, rows=37, width=40):
    keys = mx.random.split(mx.random.key(0), 4)
    gate, x, d = (mx.random.normal((rows, width), key=key).astype(dtype) for key in keys[:3])
    return gate, x, d, mx.random.uniform(shape=(rows,), key=keys[3])


def truth(*arrays):
    gate, x, d, score = (np.array(array.astype(mx.float32), np.float64) for array in arrays)
    s = 1 / (1 + np.exp(-gate))
    weighted = d * score[:, None]
    return gate * s * x, weighted * x * s * (1 + gate * (1 - s)), weighted * gate * s, (d * gate * s * x).sum(axis=1)


# Rows of fewer pieces than the lanes that share one, of as many, and of more.
@pytest.mark.parametrize("width", [8, 40, 256, 520])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_against_float64(dtype, width, execute):
    arrays = random_arrays(dtype, width=width)
    found = scored_swiglu.gradients(*arrays)
    assert [array.dtype for array in found] == [dtype] * 3 + [mx.float32]
    for array, expected in zip(found, truth(*arrays), strict=True):
        assert relative_error(array, expected) < (ROUNDING[dtype] if array.ndim == 2 else ROUNDING[mx.float32])


def test_the_same_by_operations():
    arrays = gate, x, d, score = random_arrays(mx.float32)
    hidden, inner, dscore = scored_swiglu.with_mlx(lambda g, x: g * mx.sigmoid(g) * x, [gate, x], d, score[:, None])
    for array, expected in zip([hidden, *inner, dscore], truth(*arrays), strict=True):
        np.testing.assert_allclose(np.array(array), expected, rtol=0, atol=1e-5)
