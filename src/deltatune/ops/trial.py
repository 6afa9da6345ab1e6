"""The trial of a kernel before its first use on a machine, and the one measure of by how much results are off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from ..errors import first_line

logger = logging.getLogger(__name__)

Kind = tuple[tuple[int, ...], mx.Dtype]


def relative_error(found: mx.array | np.ndarray, expected: mx.array | np.ndarray) -> float:
    """The largest difference over the largest element of `expected`; infinite for another shape or what is no number.

    Example:
        >>> relative_error(mx.array([1.0, 2.5]), mx.array([1.0, 2.0]))
        0.25
    """
    one, other = _wide(found), _wide(expected)
    if one.shape != other.shape or not np.isfinite(one).all():
        return float("inf")
    if not one.size:
        return 0.0
    error, largest = np.abs(one - other).max(), np.abs(other).max()
    return float(error / largest) if largest > 0 else float("inf" if error > 0 else 0.0)


def largest_error(found: Sequence[mx.array | np.ndarray], expected: Sequence[mx.array | np.ndarray]) -> float:
    """The largest relative_error of arrays and what each should be."""
    return max(relative_error(one, other) for one, other in zip(found, expected, strict=True))


def _wide(array: mx.array | np.ndarray) -> np.ndarray:
    if isinstance(array, mx.array):
        array = np.array(array.astype(mx.float32))
    return array.astype(np.float64)


def random_arrays(kinds: Sequence[Kind]) -> list[mx.array]:
    """Normal numbers of these shapes and dtypes, drawn by NumPy: MLX's random state belongs to the training."""
    draw = np.random.default_rng(7)
    return [mx.array(draw.normal(size=shape).astype(np.float32)).astype(dtype) for shape, dtype in kinds]


def passes(name: str, error: Callable[[], float], bound: float, instead: str = "MLX's operations") -> bool:
    """Whether what `error` tries runs here and is within `bound`; a warning says why where it does not pass.

    Args:
        name: what is tried.
        error: tries it, and gives its largest relative error.
        bound: the largest that is allowed.
        instead: what serves where the trial fails.
    """
    try:
        worst = error()
    except (RuntimeError, ValueError) as problem:
        said = first_line(problem)[:300]
        logger.warning("%s does not run on this machine, so %s serve instead: %s", name, instead, said)
        return False
    # Written so that what is no number fails.
    if worst <= bound:
        return True
    off = "%s is off by %.1e of the largest element on this machine (%.1e allowed), so %s serve instead."
    logger.warning(off, name, worst, bound, instead)
    return False
