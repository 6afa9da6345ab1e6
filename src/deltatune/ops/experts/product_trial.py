"""Whether the kernels of `grouped` compute on this machine what products in float64 do: tried once a process."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from .. import trial
from ..kernels.launch import Launch
from . import grouped
from .grouped import Cut
from .tolerances import GROUPED, ON_TENSOR_CORES

# Rows of the experts: none at the start, more than a tile has, one, none, and some.
_COUNTS = (0, 140, 1, 0, 27)
# Sizes for tiles that are narrow, or not deep, and for the others.
_SMALL, _SHALLOW, _LARGE = 8, 24, 136
_SCALE = 1.75


def on_product(rows: mx.array, weight: mx.array, transpose: bool, added: bool) -> bool:
    """Whether `grouped.product` is for these, and right."""
    outputs, inputs = weight.shape[1:] if transpose else weight.shape[:0:-1]
    if rows.dtype != weight.dtype or not grouped.takes(rows.dtype, inputs, outputs):
        return False
    return _product_passes(rows.dtype, transpose, added, grouped.product_cut(inputs, outputs))


def on_gradient(left: mx.array, right: mx.array) -> bool:
    """Whether `grouped.gradient` is for these, and right."""
    sizes = left.shape[-1], right.shape[-1]
    if left.dtype != right.dtype or not grouped.takes(left.dtype, *sizes):
        return False
    return _gradient_passes(left.dtype, grouped.gradient_cut(*sizes))


@cache
def _product_passes(dtype: mx.Dtype, transpose: bool, added: bool, cut: Cut) -> bool:
    outputs = _SMALL if cut[1] < _LARGE // 2 else _LARGE
    rows, onto, weight = _drawn(dtype, _SHALLOW if cut == grouped.product_cut(_SHALLOW, outputs) else _LARGE, outputs)
    exact = [x @ w.T for x, w in zip(_parts(rows), _wide(weight), strict=True)]
    truth = _SCALE * np.concatenate(exact) + (_wide(onto) if added else 0.0)
    matrices = weight if transpose else mx.contiguous(weight.swapaxes(-1, -2))
    last = onto if added else None
    launch = grouped.product_launch(rows, matrices, _ends(), transpose, _SCALE, last, cut)
    return _agrees(launch, truth, GROUPED[str(dtype).rpartition(".")[2]] + ON_TENSOR_CORES)


@cache
def _gradient_passes(dtype: mx.Dtype, cut: Cut) -> bool:
    height, width = (_SMALL if size < _LARGE // 2 else _LARGE for size in cut[:2])
    right, left, weight = _drawn(dtype, width, height)
    total = weight.astype(mx.float32)
    exact = [a.T @ b for a, b in zip(_parts(left), _parts(right), strict=True)]
    truth = _wide(total) + _SCALE * np.stack(exact)
    return _agrees(grouped.gradient_launch(total, left, right, _ends(), _SCALE, cut), truth, ON_TENSOR_CORES)


def _drawn(dtype: mx.Dtype, inputs: int, outputs: int) -> tuple[mx.array, mx.array, mx.array]:
    """Rows of inputs, rows of outputs, and a matrix an expert. By NumPy: MLX's random state belongs to the training."""
    draw, rows = np.random.default_rng(0), sum(_COUNTS)
    shapes = ((rows, inputs), (rows, outputs), (len(_COUNTS), outputs, inputs))
    first, second, third = (mx.array(draw.normal(size=shape).astype(np.float32)).astype(dtype) for shape in shapes)
    return first, second, third


def _ends() -> mx.array:
    return mx.array(np.cumsum(_COUNTS).astype(np.int32))


def _wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), dtype=np.float64)


def _parts(rows: mx.array) -> list[np.ndarray]:
    """Each expert's rows."""
    return np.split(_wide(rows), np.cumsum(_COUNTS)[:-1])


def _agrees(launch: Launch, truth: np.ndarray, bound: float) -> bool:
    def error() -> float:
        (shape, dtype) = launch.outputs["out"]
        # Freed memory is used again: an element that is not written stays NaN.
        mx.eval(mx.full(shape, np.nan, dtype))
        return trial.relative_error(launch.run()[0], truth)

    return trial.passes(launch.name, error, bound, "MLX's own products")
