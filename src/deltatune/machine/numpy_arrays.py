"""Reads the numbers of MLX's arrays with NumPy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np


def as_numpy(array: mx.array) -> np.ndarray:
    """Return the numbers of an array, which must not be bf16, once they are computed; they are not to be changed.

    np.array() and memoryview() ask MLX for a buffer. If the numbers cannot be copied off an NVIDIA GPU then, MLX ends
    the process: nothing can be saved, and no message names a remedy. Here that is a RuntimeError.
    """
    numbers: Any = array
    return numbers.__array__()
