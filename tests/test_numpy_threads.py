"""Tests that numpy multiplies in the thread that asks."""

import pytest

from numpy_threads import libraries


def test_numpy_uses_one_thread_in_tests():
    found = libraries()
    if not found:
        pytest.skip("this numpy has no OpenBLAS of its own")
    assert [library.scipy_openblas_get_num_threads64_() for library in found] == [1]
