"""Tests that numpy multiplies in the thread that asks, in tests, in the programs that they start, and in ranks."""

import ctypes
import os
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


pytestmark = pytest.mark.skipif(not LIBRARIES, reason="this numpy has no OpenBLAS of its own")


def started(**variables: str) -> list[str]:
    """The threads that numpy has in a program that imports deltatune."""
    inherited = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-c", PROGRAM, *LIBRARIES]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=inherited | variables).stdout.split()


def test_numpy_uses_one_thread_in_tests():
    assert [ctypes.CDLL(file).scipy_openblas_get_num_threads64_() for file in LIBRARIES] == [1]
    assert started(OPENBLAS_NUM_THREADS=os.environ["OPENBLAS_NUM_THREADS"]) == ["1"]


def test_numpy_uses_one_thread_in_a_rank_unless_told_otherwise():
    assert started(MLX_RANK="0") == ["1"]
    assert started(MLX_RANK="0", OPENBLAS_NUM_THREADS="2") == ["2"]
