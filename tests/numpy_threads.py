"""Lets numpy multiply in the thread that asks.

Its OpenBLAS has a thread for each core. Those that have nothing to do wait without a pause for a while, and take a
tenth of the time of tests that compare with float64. deltatune's own OpenBLAS, which MLX uses, is another library.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

FOLDER = Path(np.__file__).parent.parent / "numpy.libs"


def libraries() -> list[ctypes.CDLL]:
    """Return numpy's own OpenBLAS, where its wheel holds one."""
    return [ctypes.CDLL(str(file)) for file in FOLDER.glob("libscipy_openblas64_*")]


def use_one() -> None:
    """Let numpy use one thread from now on."""
    for library in libraries():
        library.scipy_openblas_set_num_threads64_(1)
