"""How far a result is from the truth, and memory that shows what a kernel does not write."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

# Sizes of freed memory that MLX hands out again, in fp32 numbers: 2^4 to 2^22.
_POWERS = range(4, 23)


def relative_norm(found: np.ndarray, truth: np.ndarray) -> float:
    """The norm of the error over the norm of the truth; infinite where `found` has another shape or is not finite.

    Where the truth is zero throughout, only zero is right.
    """
    if found.shape != truth.shape or not np.isfinite(found).all():
        return float("inf")
    size, whole = np.linalg.norm(np.asarray(found, np.float64) - truth), np.linalg.norm(truth)
    if whole == 0:
        return float("inf") if size > 0 else 0.0
    return float(size / whole)


def wide(array: mx.array) -> np.ndarray:
    """The numbers of `array` in float64."""
    return np.array(array.astype(mx.float32), dtype=np.float64)


def poison(like: Iterable[mx.array] = ()) -> None:
    """Fill memory with NaN and free it, so that the arrays that MLX makes next hold NaN where nothing is written.

    Args:
        like: arrays whose sizes the next results will have; other sizes are covered by powers of two.
    """
    shapes = [(each.shape, each.dtype) for each in like if mx.issubdtype(each.dtype, mx.floating)]
    mx.clear_cache()
    mx.eval([mx.full(shape, mx.nan, dtype) for shape, dtype in shapes for _ in range(2)])
    mx.eval([mx.full((2**power,), mx.nan) for power in _POWERS for _ in range(2)])
