"""The measure of error, and arrays drawn for a trial."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.operator import measure

INFINITE = float("inf")


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        (mx.array([1.0, 2.5]), mx.array([1.0, 2.0]), 0.25),
        (mx.ones((2, 2)), mx.ones((2, 2)), 0.0),
        (mx.ones((2, 2)) * mx.nan, mx.ones((2, 2)), INFINITE),
        (mx.ones(2) * mx.inf, mx.ones(2), INFINITE),
        (mx.ones(2), mx.array([mx.nan, 1.0]), INFINITE),
        (mx.ones(2), mx.array([1.0, mx.inf]), INFINITE),
        (mx.ones((2, 3)), mx.ones((2, 2)), INFINITE),
        (mx.zeros(3), mx.zeros(3), 0.0),
        (mx.ones(3), mx.zeros(3), INFINITE),
        (mx.array([1.0, 2.0], mx.bfloat16), np.array([1.0, 2.0]), 0.0),
        (mx.zeros((0, 3)), mx.zeros((0, 3)), 0.0),
    ],
)
def test_the_error_is_relative_to_the_largest_element(found, expected, error):
    assert measure.relative_error(found, expected) == error


def test_float64_is_not_rounded():
    assert measure.relative_error(np.array([1.0 + 1e-12]), np.array([1.0])) == pytest.approx(1e-12, rel=1e-3)
    assert measure.relative_norm(np.array([3.0, 4.0 + 1e-12]), np.array([3.0, 4.0])) == pytest.approx(2e-13, rel=1e-2)


def test_the_largest_error_of_several_arrays_counts():
    assert measure.largest_error([mx.ones(2), mx.array([3.0])], [mx.ones(2), mx.array([2.0])]) == 0.5
    with pytest.raises(ValueError, match="zip"):
        measure.largest_error([mx.ones(2)], [])


def test_random_arrays_do_not_use_mlxs_random_state():
    before = mx.random.state[0].tolist()
    one, other = measure.random_arrays([((3, 2), mx.float32), ((4,), mx.bfloat16)])
    assert (one.shape, one.dtype, other.shape, other.dtype) == ((3, 2), mx.float32, (4,), mx.bfloat16)
    assert mx.random.state[0].tolist() == before
