"""Tests that MLX's arrays are read into NumPy."""

from threading import Thread

import mlx.core as mx
import numpy as np
import pytest

from deltatune.machine.numpy_arrays import as_numpy


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bool_, mx.uint8, mx.int64], ids=str)
def test_the_numbers_are_those_of_the_array(dtype):
    array = mx.arange(12).reshape(3, 4).T.astype(dtype)
    numbers = as_numpy(array)
    assert numbers.dtype.itemsize == dtype.size
    assert numbers.tolist() == array.tolist()


@pytest.mark.parametrize(
    "part", [np.s_[2:], np.s_[:, 1], np.s_[::-1], np.s_[1:4, ::-2], np.s_[None, 2, :0], np.s_[3, 2]], ids=str
)
def test_a_part_has_its_own_numbers(part):
    array = mx.arange(30).reshape(5, 6)
    assert np.array_equal(as_numpy(array[part]), np.arange(30).reshape(5, 6)[part])


def test_they_outlive_the_array():
    numbers = as_numpy(mx.arange(1000) + 1)
    mx.eval(mx.zeros(1000, mx.int32) - 1)
    assert np.array_equal(numbers, np.arange(1, 1001))


def test_an_array_that_cannot_be_computed_is_an_error():
    made = []

    def make() -> None:
        made.append(mx.add(mx.ones(4), 1, stream=mx.new_stream(mx.cpu)))

    # MLX computes an array only in the thread whose stream it was made on.
    thread = Thread(target=make)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="Stream"):
        as_numpy(made[0])
