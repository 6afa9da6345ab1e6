"""Looks for x.at[:, t].add(u) that reads u with a wrong batch stride, so that rows after the first are wrong.

mlx 0.31.2 on Metal has the fault (mlx issue 3483).
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ...ops.trial.measure import relative_error
from .fault import ABSENT, PRESENT, Fault

NAME = "scatter-add with a batch stride"
# The shape of x and the index of the update: a step of a sequence, then blocks of a matrix.
_CASES = (
    ((3, 5, 7, 4), (slice(None), 2)),
    ((32, 32), (slice(0, 16), slice(0, 16))),
    ((17, 33), (slice(0, 4), slice(0, 8))),
    ((32, 32), (slice(16, 32), slice(16, 32))),
)


def find() -> Fault:
    """Compare MLX's default device with NumPy."""
    error = max(_error(shape, place) for shape, place in _CASES)
    if error == 0:
        return Fault(NAME, ABSENT, "x.at[:, t].add(u) adds what it should", error)
    return Fault(NAME, PRESENT, "x.at[:, t].add(u) adds the wrong rows of u: update mlx", error)


def _error(shape: tuple[int, ...], place: tuple) -> float:
    random = np.random.default_rng(0)
    # Sums of whole numbers are exact, so that any difference shows the fault.
    x = random.integers(-9, 9, shape).astype(np.float32)
    update = random.integers(-9, 9, x[place].shape).astype(np.float32)
    computed = mx.array(x).at[place].add(mx.array(update))
    x[place] += update
    return relative_error(computed, mx.array(x))
