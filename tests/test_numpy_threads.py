"""Tests that numpy multiplies in the thread that asks, in tests and in the programs that they start."""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# Numpy's own OpenBLAS, where its wheel holds one. That of deltatune, which MLX uses, is another library.
LIBRARIES = [str(file) for file in (Path(np.__file__).parent.parent / "numpy.libs").glob("libscipy_openblas64_*")]
PROGRAM = """
import ctypes, sys, deltatune, numpy
print(*[ctypes.CDLL(file).scipy_openblas_get_num_threads64_() for file in sys.argv[1:]])
"""


@pytest.mark.skipif(not LIBRARIES, reason="this numpy has no OpenBLAS of its own")
def test_numpy_uses_one_thread_in_tests():
    assert [ctypes.CDLL(file).scipy_openblas_get_num_threads64_() for file in LIBRARIES] == [1]
    started = [sys.executable, "-c", PROGRAM, *LIBRARIES]
    assert subprocess.run(started, capture_output=True, text=True, check=True).stdout.split() == ["1"]
