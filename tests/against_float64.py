"""Values and gradients of a function beside those of its definition in float64."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from deltatune.ops.operator.measure import relative_error


def drawn(*shapes: tuple[int, ...], dtype: mx.Dtype = mx.float32, seed: int = 5) -> list[mx.array]:
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True)]


def listed(result: mx.array | Sequence[mx.array]) -> list[mx.array]:
    return [result] if isinstance(result, mx.array) else list(result)


def with_gradients(function: Callable, arrays: Sequence[mx.array], cotangents: Sequence[mx.array]) -> list[mx.array]:
    """Return the outputs and the gradients of `arrays`."""
    outputs, gradients = mx.vjp(lambda *primals: listed(function(*primals)), list(arrays), list(cotangents))
    return [*outputs, *gradients]


def errors(function: Callable, definition: Callable, arrays: Sequence[mx.array]) -> list[float]:
    """Return the error of each output and gradient over its largest true element; NaN counts as infinite.

    A gradient has its array's dtype, and an output that of the first array or fp32.
    """
    outputs = listed(function(*arrays))
    cotangents = [drawn(y.shape, dtype=y.dtype, seed=i)[0] for i, y in enumerate(outputs)]
    found = with_gradients(function, arrays, cotangents)
    assert {y.dtype for y in outputs} <= {arrays[0].dtype, mx.float32}
    assert [gradient.dtype for gradient in found[len(outputs) :]] == [array.dtype for array in arrays]
    with mx.stream(mx.cpu):
        wide, d = ([array.astype(mx.float64) for array in group] for group in (arrays, cotangents))
        exact = [np.array(array) for array in with_gradients(definition, wide, d)]
    return [relative_error(one, other) for one, other in zip(found, exact, strict=True)]
