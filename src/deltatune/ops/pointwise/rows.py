"""Takes rows by index, and sums each token's rows with weights, as the expert block does between two orders of rows.

MLX's gather on CUDA copies element by element, at a sixth of the memory's speed, and a weighted sum of rows would take
four more passes over memory. take_rows and sum_rows have no gradients, since the expert block computes its own.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..kernels.launch import Arrays, Device, Outputs, forced
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator, KernelWorkload, in_each_dtype
from ..operator.measure import as_float64, random_arrays
from .passes import BOUNDS, LEAST, by_lane

# How many elements one lane holds.
_LANE = 8
_WIDTH = f"(x_shape[1] / {_LANE})"


def take_rows(x: mx.array, index: mx.array) -> mx.array:
    """Return x[index], [R, D], of x [N, D] and integers [R]."""
    if not forced() and not serves(x, index.size):
        return x[index]
    if index.dtype not in (mx.int32, mx.uint32):
        # NumPy's integers have 64 bits, and the kernels read 32.
        index = index.astype(mx.int32)
    inputs = {"x": x, "index": index}
    outputs: Outputs = {"y": ((index.size, x.shape[1]), x.dtype)}
    sizes = (f"(long)index_shape[0] * {_WIDTH}", f"(int){_WIDTH}", "x_shape[0]")
    return by_lane("rows_taken", inputs, outputs, sizes, index.size * x.shape[1] // _LANE)()[0]


def sum_rows(x: mx.array, index: mx.array, weights: mx.array | None = None, dtype: mx.Dtype | None = None) -> mx.array:
    """Return the sum over k of weights[n, k] x[index[n, k]], [N, D], with fp32 sums, by default in x's dtype.

    x is [R, D], the index [N, k], and the weights [N, k] fp32; None means 1.
    """
    dtype = dtype or x.dtype
    if not forced() and not serves(x, index.size):
        return _sum_rows_with_mlx(x, index, weights).astype(dtype)
    tokens, k = index.shape
    inputs: Arrays = {"x": x, "place": index} | ({} if weights is None else {"weights": weights})
    outputs: Outputs = {"y": ((tokens, x.shape[1]), dtype)}
    last = "place" if weights is None else "weights"
    arguments = (f"(long)place_shape[0] * {_WIDTH}", f"(int){_WIDTH}", "x", "place", last, "y")
    lanes = tokens * x.shape[1] // _LANE
    return by_lane("rows_combined", inputs, outputs, arguments, lanes, (k, int(weights is not None)))()[0]


def serves(x: mx.array, rows: int) -> bool:
    """Whether the kernels are to be used for so many rows of x: they cover them, are faster, and were found right."""
    fits = x.shape[1] % _LANE == 0 and rows * x.shape[1] >= LEAST and x.dtype in BOUNDS
    return fits and OPERATOR.serves(x.dtype)


def _sum_rows_with_mlx(x: mx.array, index: mx.array, weights: mx.array | None) -> mx.array:
    rows = x[index]
    if weights is not None:
        rows = rows * weights[..., None].astype(rows.dtype)
    return rows.astype(mx.float32).sum(axis=1)


def trial_case(dtype: mx.Dtype, tokens: int = 30, top_k: int = 3, width: int = 24) -> Case[Device]:
    """Return the case of rows of this dtype: some taken, and sums of others with and without weights.

    NumPy computes its truth: MLX would build kernels for it on CUDA, which takes seconds.
    """
    total = tokens * top_k
    x, weights = random_arrays([((total, width), dtype), ((tokens, top_k), mx.float32)])
    order = np.random.default_rng(1).permutation(total).astype(np.int32)
    index = order.reshape(tokens, top_k)

    def call() -> list[mx.array]:
        from_either_end, places = mx.array(order - total * (order % 2)), mx.array(index)
        sums = [sum_rows(x, places, factors, mx.float32) for factors in (None, weights)]
        return [take_rows(x, from_either_end), *sums]

    def truth() -> list[np.ndarray]:
        wide, factors = as_float64(x), as_float64(weights)
        return [wide[order], wide[index].sum(axis=1), (wide[index] * factors[..., None]).sum(axis=1)]

    results = ("taken", "sums", "weighted sums")
    return Case(f"rows of {dtype}", results, by_kernels(call), truth, BOUNDS[dtype], like=[x])


def _workloads(quick: bool) -> list[KernelWorkload]:
    sizes = (30, 3, 64) if quick else (2048, 8, 2048)
    return in_each_dtype("rows", trial_case, *sizes)


OPERATOR = KernelOperator("passes", trial_case, workloads=_workloads)
