"""Tests that a run reads arrays by as_numpy() alone, since an error of a GPU in any other way ends the process."""

import ctypes
import sys

import mlx.core as mx
import numpy as np
import pytest

# Where CPython keeps the functions that fill buffers in a type: behind 20 pointers.
AS_BUFFER = 20 * ctypes.sizeof(ctypes.c_void_p)
GET_BUFFER = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)


@pytest.fixture
def readers():
    """The names of the functions that ask an array of MLX for a buffer, as NumPy does for them."""
    names: set[str] = set()
    functions = ctypes.c_void_p.from_address(id(mx.array) + AS_BUFFER).value
    assert functions is not None
    slot = ctypes.c_void_p.from_address(functions)
    address = slot.value
    assert address is not None
    plain = GET_BUFFER(address)

    def noting(array: mx.array, view: int, flags: int) -> int:
        names.add(sys._getframe(1).f_code.co_name)
        return plain(array, view, flags)

    in_its_place = GET_BUFFER(noting)
    slot.value = ctypes.cast(in_its_place, ctypes.c_void_p).value
    try:
        yield names
    finally:
        slot.value = address


def test_reading_is_noticed(readers):
    assert np.array(mx.arange(3)).tolist() == [0, 1, 2]
    assert readers == {"test_reading_is_noticed"}


@pytest.mark.parametrize("early", [True, False])
def test_a_run_reads_by_one_function(early, make_trainer, request, readers):
    if early:
        request.getfixturevalue("early_starts")
    make_trainer().run()
    assert not readers
