"""The measure of error that trials share, and memory full of NaN, which shows elements that a kernel leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from ...machine.host_memory import as_numpy
from ..kernels.cubin import launching
from ..tracing import trace

Kind = tuple[tuple[int, ...], mx.Dtype]

# By dtype, how far one rounding moves a number, over the number: half a unit in the last place. For fp32, in which
# kernels compute, it is nothing.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


# MLX reuses freed buffers by size; these are the sizes filled with NaN, as powers of two of fp32 numbers.
_POWERS = range(4, 23)


@contextmanager
def apart() -> Iterator[None]:
    """Within the context a trial is apart from the step that is traced around it, because its numbers are compared.

    Its kernels are launched even if those of the step are only built, and its loops over a long row take all turns even
    if those of a plan's step leave most of them out.
    """
    with launching(), trace.outside():
        yield


def largest_element(array: np.ndarray) -> float:
    """Return the size of the largest element, 0 for an array without any."""
    return float(np.abs(array).max(initial=0.0))


def euclidean_norm(array: np.ndarray) -> float:
    """Return the root of the sum of the squares."""
    return float(np.linalg.norm(array))


def relative_error(
    result: mx.array | np.ndarray, truth: mx.array | np.ndarray, size: Callable[[np.ndarray], float] = largest_element
) -> float:
    """Return the size of the difference over the size of `truth`, in float64; the size is that of the largest element.

    It is infinite for arrays of different shapes, where either has NaN or infinity in it, since nothing can be compared
    with that, and where the truth alone is zero.
    """
    one, other = as_float64(result), as_float64(truth)
    if one.shape != other.shape or not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("inf")
    error, whole = size(one - other), size(other)
    return error / whole if whole > 0 else float("inf" if error > 0 else 0.0)


def relative_norm(result: mx.array | np.ndarray, truth: mx.array | np.ndarray) -> float:
    """Return the norm of the difference over the norm of `truth`, as relative_error does for the largest element."""
    return relative_error(result, truth, euclidean_norm)


def largest_error(results: Sequence[mx.array | np.ndarray], truths: Sequence[mx.array | np.ndarray]) -> float:
    """Return the largest relative_error of several arrays, each compared with its own truth."""
    return max(relative_error(one, other) for one, other in zip(results, truths, strict=True))


def as_float64(array: mx.array | np.ndarray) -> np.ndarray:
    """Return the numbers of an array as a float64 NumPy array."""
    if isinstance(array, mx.array):
        array = as_numpy(array.astype(mx.float32))
    return array.astype(np.float64)


def in_float64(function: Callable[..., Sequence[mx.array]], *groups: Sequence[mx.array]) -> list[np.ndarray]:
    """Compute `function` of these groups of arrays in float64, on the CPU, which alone has float64."""
    with mx.stream(mx.cpu):
        exact = function(*([array.astype(mx.float64) for array in group] for group in groups))
        return [np.array(array) for array in exact]


def poison(like: Iterable[mx.array] = (), *, thoroughly: bool = True) -> None:
    """Fill memory with NaN and free it, so that MLX's next arrays hold NaN wherever nothing is written.

    It fills buffers of the sizes of `like` and, if done thoroughly, of other sizes too, once MLX has given back those
    that it keeps.
    """
    shapes = [(array.shape, array.dtype) for array in like if mx.issubdtype(array.dtype, mx.floating)]
    if thoroughly:
        mx.clear_cache()
    mx.eval([mx.full(shape, mx.nan, dtype) for shape, dtype in shapes for _ in range(2)])
    if thoroughly:
        mx.eval([mx.full((2**power,), mx.nan) for power in _POWERS for _ in range(2)])


def random_arrays(kinds: Sequence[Kind]) -> list[mx.array]:
    """Draw normal numbers of these shapes and dtypes, with NumPy, since MLX's random state belongs to the training."""
    draw = np.random.default_rng(7)
    return [mx.array(draw.normal(size=shape).astype(np.float32)).astype(dtype) for shape, dtype in kinds]
