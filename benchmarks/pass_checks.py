"""What the benchmarks of passes share: random arrays, errors against float64, and the time of a call among many."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from deltatune.ops.operator.measure import poison, relative_error

Arrays = list[mx.array]
Function = Callable[..., Arrays]


def drawn(shapes: Sequence[tuple[int, ...]], dtype: mx.Dtype = mx.bfloat16, seed: int = 0) -> Arrays:
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True)]


def errors(ours: Function, exact: Function, arrays: Arrays) -> list[float]:
    """The largest errors of outputs and gradients over the largest exact element; `exact` is computed in float64."""
    d = [mx.random.normal(y.shape, key=mx.random.key(i)).astype(y.dtype) for i, y in enumerate(ours(*arrays))]

    def both() -> Arrays:
        outputs, gradients = mx.vjp(ours, arrays, d)
        mx.eval(outputs, gradients)
        return [*outputs, *gradients]

    poison(both())
    found = both()
    with mx.stream(mx.cpu):
        wide, wide_d = ([array.astype(mx.float64) for array in group] for group in (arrays, d))
        truth = [np.array(array) for group in mx.vjp(exact, wide, wide_d) for array in group]
    return [relative_error(one, other) for one, other in zip(found, truth, strict=True)]


def microseconds(graph: Callable[[], Iterator[mx.array]], calls: int) -> float:
    """The time of one of the calls that are evaluated together, the best of four after the first."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        mx.eval(list(graph()))
        times.append(time.perf_counter() - start)
    return 1e6 * min(times[1:]) / calls
