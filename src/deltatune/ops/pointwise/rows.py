"""Rows chosen by number, and each token's rows summed with weights: between a token's order and that of experts.

MLX's gather on CUDA goes element by element, at a sixth of what memory gives; and a weighted sum over chosen rows would
be four passes more. No gradients: the expert block, which calls these, takes its own.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ...machine import backend
from .. import trial
from ..kernels.launch import Arrays, Outputs
from .pass_launch import Execute, Pass
from .passes import BOUNDS, LEAST

_LANE = 8
_WIDTH = f"(x_shape[1] / {_LANE})"


def taken(x: mx.array, index: mx.array, *, execute: Execute | None = None) -> mx.array:
    """x[index] for x [N, D] and integers [R]."""
    if execute is None:
        if not proven(x, index.size):
            return x[index]
        execute = Pass.run
    inputs: Arrays = {"x": x, "index": index}
    outputs: Outputs = {"y": ((index.size, x.shape[1]), x.dtype)}
    arguments = (f"(long)index_shape[0] * {_WIDTH}", f"(int){_WIDTH}", "x", "index", "y")
    return execute(Pass("rows_taken", inputs, outputs, arguments, index.size * x.shape[1] // _LANE))[0]


def combined(
    x: mx.array,
    place: mx.array,
    weights: mx.array | None = None,
    dtype: mx.Dtype | None = None,
    *,
    execute: Execute | None = None,
) -> mx.array:
    """sum over k of weights[n, k] x[place[n, k]] for x [R, D], place [N, k] integers, weights fp32: [N, D].

    Sums are fp32; the result is of `dtype` (that of x). Without weights they are 1.
    """
    kind = dtype or x.dtype
    if execute is None:
        if not proven(x, place.size):
            return _combined(x, place, weights).astype(kind)
        execute = Pass.run
    tokens, k = place.shape
    inputs: Arrays = {"x": x, "place": place} | ({} if weights is None else {"weights": weights})
    outputs: Outputs = {"y": ((tokens, x.shape[1]), kind)}
    last = "place" if weights is None else "weights"
    arguments = (f"(long)place_shape[0] * {_WIDTH}", f"(int){_WIDTH}", "x", "place", last, "y")
    lanes = tokens * x.shape[1] // _LANE
    return execute(Pass("rows_combined", inputs, outputs, arguments, lanes, (k, int(weights is not None))))[0]


def proven(x: mx.array, rows: int) -> bool:
    """Whether `rows` rows of x are worth a pass on CUDA, in pieces of eight, and both passes are right there."""
    if backend.device() != "cuda":
        return False
    return x.shape[1] % _LANE == 0 and rows * x.shape[1] >= LEAST and _proven(x.dtype)


def _combined(x: mx.array, place: mx.array, weights: mx.array | None) -> mx.array:
    """In fp32."""
    rows = x[place]
    if weights is not None:
        rows = rows * weights[..., None].astype(rows.dtype)
    return rows.astype(mx.float32).sum(axis=1)


@cache
def _proven(dtype: mx.Dtype, execute: Execute = Pass.run) -> bool:
    def difference() -> float:
        (x, weights) = trial.random_arrays([((90, 24), dtype), ((30, 3), mx.float32)])
        order = mx.argsort(mx.random.normal((90,), key=mx.random.key(1)))
        place = order.reshape(30, 3)
        found = [taken(x, order, execute=execute)]
        found += [combined(x, place, each, mx.float32, execute=execute) for each in (None, weights)]
        wide = x.astype(mx.float32)
        return trial.largest_error(found, [x[order], *(_combined(wide, place, each) for each in (None, weights))])

    return trial.passes(f"rows of {dtype}", difference, BOUNDS[dtype])
