"""The trial of a kernel before its first use on a machine, and the measure of error that all trials share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from ..errors import first_line

logger = logging.getLogger(__name__)

Kind = tuple[tuple[int, ...], mx.Dtype]

# By dtype, how far one rounding moves a number, over the number: half a unit in the last place. For fp32, in which
# kernels compute, it is nothing.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def relative_error(found: mx.array | np.ndarray, expected: mx.array | np.ndarray) -> float:
    """Return the largest difference over the largest element of `expected`.

    It is infinite for arrays of different shapes, and for results with NaN or infinity in them.

    Example:
        >>> relative_error(mx.array([1.0, 2.5]), mx.array([1.0, 2.0]))
        0.25
    """
    one, other = _float64(found), _float64(expected)
    if one.shape != other.shape or not np.isfinite(one).all():
        return float("inf")
    if not one.size:
        return 0.0
    error, largest = np.abs(one - other).max(), np.abs(other).max()
    return float(error / largest) if largest > 0 else float("inf" if error > 0 else 0.0)


def largest_error(found: Sequence[mx.array | np.ndarray], expected: Sequence[mx.array | np.ndarray]) -> float:
    """Return the largest relative_error of several arrays, each compared with its expected value."""
    return max(relative_error(one, other) for one, other in zip(found, expected, strict=True))


def _float64(array: mx.array | np.ndarray) -> np.ndarray:
    if isinstance(array, mx.array):
        array = np.array(array.astype(mx.float32))
    return array.astype(np.float64)


def random_arrays(kinds: Sequence[Kind]) -> list[mx.array]:
    """Draw normal numbers of these shapes and dtypes, with NumPy, since MLX's random state belongs to the training."""
    draw = np.random.default_rng(7)
    return [mx.array(draw.normal(size=shape).astype(np.float32)).astype(dtype) for shape, dtype in kinds]


def passes(name: str, error: Callable[[], float], bound: float, instead: str = "MLX's operations") -> bool:
    """Whether a kernel runs on this machine with an error of at most `bound`; if not, a warning says why.

    Args:
        name: the kernel's name for the warning.
        error: runs the kernel, and returns its largest relative error.
        bound: the largest error that is allowed.
        instead: what is used in place of a kernel that fails, for the warning.
    """
    try:
        largest = error()
    except (RuntimeError, ValueError) as problem:
        reason = first_line(problem)[:300]
        logger.warning("%s does not run on this machine, so %s serve instead: %s", name, instead, reason)
        return False
    # The comparison is this way round so that NaN fails.
    if largest <= bound:
        return True
    message = "%s is off by %.1e of the largest element on this machine (%.1e allowed), so %s serve instead."
    logger.warning(message, name, largest, bound, instead)
    return False
