"""Measures the error of a result, and fills memory with NaN so that elements which a kernel leaves out are seen."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

# MLX reuses freed buffers by size; these are the sizes filled with NaN, as powers of two of fp32 numbers.
_POWERS = range(4, 23)


def relative_norm(found: np.ndarray, truth: np.ndarray) -> float:
    """The norm of the error divided by the norm of the truth.

    It is infinite where `found` has another shape or is not finite, and where `truth` is zero but `found` is not.
    """
    if found.shape != truth.shape or not np.isfinite(found).all():
        return float("inf")
    size, whole = np.linalg.norm(np.asarray(found, np.float64) - truth), np.linalg.norm(truth)
    if whole == 0:
        return float("inf") if size > 0 else 0.0
    return float(size / whole)


def as_float64(array: mx.array) -> np.ndarray:
    """The numbers of `array` as a float64 NumPy array."""
    return np.array(array.astype(mx.float32), dtype=np.float64)


def poison(like: Iterable[mx.array] = ()) -> None:
    """Fill memory with NaN and free it, so that MLX's next arrays hold NaN wherever nothing is written.

    Args:
        like: Arrays of the sizes that the next results will have; powers of two are filled in any case.
    """
    shapes = [(each.shape, each.dtype) for each in like if mx.issubdtype(each.dtype, mx.floating)]
    mx.clear_cache()
    mx.eval([mx.full(shape, mx.nan, dtype) for shape, dtype in shapes for _ in range(2)])
    mx.eval([mx.full((2**power,), mx.nan) for power in _POWERS for _ in range(2)])
