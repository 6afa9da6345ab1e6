"""Joining many arrays, and the sum of their squares, in one launch each; and when the launches are used."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.machine import backend
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.operator import kernel_operator
from deltatune.ops.pointwise import joining, squares
from deltatune.ops.pointwise.joining import end_to_end
from deltatune.ops.pointwise.squares import sum_of_squares

SHAPES = [(3, 50), (1,), (7,), (131, 67), (8, 16)]


def random_arrays(dtype, shapes=SHAPES):
    return [mx.random.normal(shape, key=mx.random.key(i)).astype(dtype) for i, shape in enumerate(shapes)]


@pytest.fixture
def few_lanes(monkeypatch):
    """Lanes take several pieces each, as they do of large arrays."""
    monkeypatch.setattr(squares, "_MOST", 256)


@pytest.mark.usefixtures("few_lanes")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_equals_float64(dtype, execute):
    arrays = random_arrays(dtype)
    arrays[0] = arrays[0].T
    arrays.append(mx.full((9,), 1e-3, mx.float32))
    expected = sum(np.square(np.array(array.astype(mx.float32), np.float64)).sum() for array in arrays)
    # MLX adds up an array on a CPU in long runs, each sum of which is rounded.
    for run, bound in ((execute, 1e-6), (None, 1e-5)):
        with on(run):
            found = sum_of_squares(arrays)
        assert found.dtype == mx.float32
        assert found.shape == ()
        np.testing.assert_allclose(found.item(), expected, rtol=bound)


@pytest.mark.usefixtures("few_lanes")
@pytest.mark.parametrize("at", [0, 1000, 8776])
@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_one_nonfinite_element_makes_the_sum_nonfinite(value, at, execute):
    x = mx.zeros((131 * 67,))
    x[at] = value
    assert not mx.isfinite(sum_of_squares([x, mx.zeros((3,))]))


def test_when_launches_are_used(monkeypatch):
    launches = []

    def run(launch):
        launches.append(launch)
        return [launch.inputs["before"] + launch.inputs["x"].square().sum() / launch.inputs["before"].size]

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(kernel_operator, "is_right", lambda _case_of, dtype, **_: dtype != mx.float16)
    arrays = random_arrays(mx.float32)
    for device, times in (("cpu", 0), ("metal", 0), ("cuda", len(SHAPES))):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        np.testing.assert_allclose(sum_of_squares(arrays), squares._with_mlx(arrays), rtol=1e-5)
        sum_of_squares([*arrays, mx.ones((3,), mx.float16)])
        assert len(launches) == times


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_equals_a_concatenation(dtype, execute):
    arrays = random_arrays(dtype)
    arrays[0] = arrays[0].T
    expected = mx.concatenate([array.reshape(-1) for array in arrays]).astype(mx.float32)
    for run in (execute, None):
        with on(run):
            found = end_to_end(arrays)
        assert found.dtype == mx.float32
        assert mx.array_equal(found, expected)


def test_when_arrays_are_joined_by_launches(monkeypatch):
    launches = []

    def run(launch):
        launches.append(launch.name)
        assert len(launch.inputs) <= joining.MOST
        return [mx.concatenate([array.reshape(-1) for array in launch.inputs.values()])]

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(kernel_operator, "is_right", lambda *_, **__: True)
    arrays = random_arrays(mx.float32)
    many = arrays * (1 + joining.MOST // len(arrays))
    cases = [arrays, arrays[:1], [arrays[0], arrays[1].astype(mx.bfloat16)], many]
    for device, times in (("cpu", 0), ("metal", 0), ("cuda", 3)):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        launches.clear()
        for case in cases:
            assert mx.array_equal(end_to_end(case), mx.concatenate([array.reshape(-1) for array in case]))
        # The first case takes one launch, and the last takes two.
        assert len(launches) == times
