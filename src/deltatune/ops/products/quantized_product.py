"""Multiplies rows by a quantised matrix after unpacking it, for the many rows of a training step.

mx.quantized_matmul is made for a row or two: it unpacks numbers one at a time on a CPU, and uses CUDA's tensor cores
poorly. Here a large matrix is unpacked in slabs, and the backward pass unpacks it again, so that no unpacked matrix is
kept between the passes. patches/tables/products.py puts this in the place of mx.quantized_matmul.

A BLAS has products in fp32 alone. MLX computes those in 16 bits by a loop of its own, which is some thirty times slower
(docs/decisions/cpu.md). So `narrow_product` converts a matrix in 16 bits to fp32, one slab after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...machine import backend
from ..functional import is_floating, with_gradient
from ..pointwise import unpacking
from ..tracing import trace
from ..tracing.turns import blank, turns

# The number of rows from which unpacking first is faster; on Metal choice.py compares times.
ROWS = {"cpu": 8, "cuda": 64}
# The same of a product with so many multiplications, for which an NVIDIA GPU takes longer than for its launches.
ROWS_OF_LARGE = 8
LARGE = 10**8
# The size of a slab, the part of a matrix that is unpacked at a time.
SLAB_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20, "metal": 256 * 2**20}
# A matrix that is unpacked whole has at most this part of an NVIDIA GPU's memory: the head of a 9B takes 2 GB.
WHOLE_IN_MEMORY = 32
# The slabs at either end that a plan traces: together they fill MLX's queue, which holds their numbers.
_SLABS_IN_PLAN = 12
_PACKED_SLABS_IN_PLAN = 3


class Quantization(NamedTuple):
    """How a matrix [..., out, in] is quantised, and which of its axes is multiplied."""

    # Whether the rows that are multiplied are [..., in], which gives [..., out], or the other way round.
    transpose: bool
    group_size: int | None
    bits: int | None
    mode: str

    @property
    def storage(self) -> dict[str, Any]:
        """The keyword arguments of mx.dequantize."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def inputs(self, w: mx.array) -> int:
        """Return the number of inputs of a matrix with these words."""
        return w.shape[-1] * 32 // self.bits if self.bits else 8 * w.shape[-1]


def serves(x: mx.array, w: mx.array, scales: mx.array) -> bool:
    """Whether `packed_product` is to be used for these rows on this device.

    w is the packed matrix, or [..., out, packed in] with a matrix for each of the leading indices of x [..., K].
    """
    fewest_rows = backend.here(ROWS, 0)
    if unpacking.OPERATOR.is_for_here and scales.shape[-1] == 1:
        fewest_rows = 1  # MLX's product on CUDA is wrong for a single group of 64 inputs, and refuses fewer inputs.
    if not fewest_rows or not is_floating(x) or x.ndim < 2 or x.size == 0:
        return False
    if w.ndim == 2:
        rows = math.prod(x.shape[:-1])
        large = backend.device() == "cuda" and rows * x.shape[-1] * w.shape[0] >= LARGE
        return rows >= (min(fewest_rows, ROWS_OF_LARGE) if large else fewest_rows)
    lead = tuple(w.shape[:-2])
    return x.shape[-2] >= fewest_rows and tuple(x.shape[:-2])[-len(lead) :] == lead


def packed_product(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, quantization: Quantization
) -> mx.array:
    """Compute mx.quantized_matmul(x, w, scales, biases, *quantization), in the same dtype.

    The unpacked matrix is multiplied in fp32 on a CPU, and in the result's dtype on a GPU. Gradients reach x, and the
    scales and biases where they are floats.
    """
    stored = [scales] if biases is None else [scales, biases]
    whole = trace.current().known.of(w, _Whole)
    dtype = _result_dtype(x, scales)
    if whole is not None and _fits_whole(w.shape[-2] * quantization.inputs(w) * dtype.size):
        by_dtype = whole.by_dtype
        if dtype not in by_dtype:
            by_dtype[dtype] = unpacked(w, *_cast(stored, dtype), dtype=dtype, **quantization.storage)
        return x.astype(dtype) @ (by_dtype[dtype].T if quantization.transpose else by_dtype[dtype])

    def forward(x: mx.array, w: mx.array, *stored: mx.array) -> mx.array:
        return rows_times(x, [w, *stored], quantization, quantization.transpose)

    def backward(primals: Any, dy: mx.array, _output: mx.array) -> list[mx.array]:
        x, *matrix = primals
        dx = rows_times(dy, matrix, quantization, not quantization.transpose)
        return [dx.astype(x.dtype), *matrix_gradients(x, matrix, quantization, dy)]

    return with_gradient(forward, backward)(x, w, *stored)


def _fits_whole(size: int) -> bool:
    """Whether a matrix of so many bytes may be unpacked whole; any may where the GPU's memory is not known."""
    return size <= (backend.gpu_memory() // WHOLE_IN_MEMORY or math.inf)


class _Whole(NamedTuple):
    """The unpacked numbers so far of a matrix that `unpacked_once` covers, by dtype; kept beside its words."""

    by_dtype: dict[mx.Dtype, mx.array]


@contextmanager
def unpacked_once(module: nn.Module) -> Iterator[None]:
    """Within the context, `packed_product` unpacks each frozen matrix of `module` once and whole, on an NVIDIA GPU.

    This is for a matrix that many rows meet a part at a time. It then takes the memory of all its numbers for so long,
    and one that is large for the GPU is unpacked in slabs.
    """
    parts = module.modules() if unpacking.OPERATOR.is_for_here else []
    frozen = [part for part in parts if "scales" in part and "scales" not in part.trainable_parameters()]
    with trace.having():
        known = trace.current().known
        for part in frozen:
            if part["weight"].ndim == 2:
                known.note(part["weight"], _Whole({}))
        try:
            yield
        finally:
            known.forget(_Whole)


def matrix_gradients(
    x: mx.array, matrix: Sequence[mx.array], quantization: Quantization, dy: mx.array
) -> list[mx.array]:
    """Return the gradients of a packed matrix's arrays by MLX's operations: of scales and biases if they are floats.

    x are the rows that met `matrix`, which is its words, scales, and biases if there are any; dy is the product's
    gradient.
    """
    w, *stored = matrix
    if not is_floating(stored[0]):
        return [mx.zeros_like(array) for array in matrix]

    def product(x: mx.array, *stored: mx.array) -> list[mx.array]:
        return [rows_times(x, [w, *stored], quantization, quantization.transpose, unpack=mx.dequantize)]

    # MLX is lazy: these gradients are computed only if something uses them. x is an argument, because mx.vjp walks
    # through everything that an array which is none was computed from.
    _, (_, *gradients) = mx.vjp(product, [x, *stored], [dy])
    return [mx.zeros_like(w), *gradients]


def rows_times(
    x: mx.array,
    matrix: Sequence[mx.array],
    quantization: Quantization | None,
    transpose: bool,
    *,
    onto: mx.array | None = None,
    unpack: Callable[..., mx.array] | None = None,
) -> mx.array:
    """Multiply rows by a packed matrix, or by one in 16 bits, of which one slab of rows is unpacked after another.

    The result is x W^T of x [..., in] with `transpose`, which that of `quantization` does not change; else x W, of x
    [..., out], plus `onto`. `matrix` is words and scales, and biases if there are any, or without `quantization` the
    matrix [out, in] in 16 bits alone. `unpack` unpacks a slab as mx.dequantize does; `unpacked` by default.
    """
    w, *stored = matrix
    result_dtype = _result_dtype(x, stored[0] if stored else w)
    dtype = mx.float32 if backend.computes_in_fp32() else result_dtype
    rows = x.astype(dtype)
    stored = _cast(stored, dtype)
    inputs = w.shape[-1] if quantization is None else quantization.inputs(w)
    slab_rows = max(1, backend.here(SLAB_BYTES) // (dtype.size * inputs)) if w.ndim == 2 else w.shape[-2]
    # Columns of the result, one array per slab; without `transpose`, the sum so far.
    results = [] if onto is None else [onto.astype(dtype)]
    ends = _SLABS_IN_PLAN if quantization is None else _PACKED_SLABS_IN_PLAN
    for start, stop, left_out in turns([*range(0, w.shape[-2], slab_rows), w.shape[-2]], ends, ends):
        if left_out:
            results += [blank(results[-1], stop - start, results[-1:], rows.ndim - 1)] if transpose else []
            continue
        # A slab waits for its rows. Otherwise MLX may unpack it long before, and mx.compile, which computes equal
        # things once, would keep the slab of the forward pass for the backward pass.
        slab = mx.depends([array[..., start:stop, :] for array in (w, *stored)], [results[-1] if results else rows])
        if quantization is None:
            numbers = slab[0].astype(dtype)
        else:
            numbers = (unpack or unpacked)(*slab, dtype=dtype, **quantization.storage)
        if transpose:
            results.append(rows @ numbers.swapaxes(-1, -2))
        else:
            part = rows[..., start:stop]
            results = [mx.addmm(results[0], part, numbers) if results else part @ numbers]
    return (results[0] if len(results) == 1 else mx.concatenate(results, axis=-1)).astype(result_dtype)


def _cast(stored: Sequence[mx.array], dtype: mx.Dtype) -> list[mx.array]:
    """Return scales and biases in the dtype in which MLX is to compute the matrix; packed scales stay as they are."""
    return [array.astype(dtype) if is_floating(array) else array for array in stored]


def _result_dtype(x: mx.array, scales: mx.array) -> mx.Dtype:
    return mx.result_type(x.dtype, scales.dtype) if is_floating(scales) else x.dtype


def unpacked(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    global_scale: mx.array | None = None,
    *,
    dtype: mx.Dtype | None = None,
    **packing: Any,
) -> mx.array:
    """Return mx.dequantize of one or several matrices; `global_scale` [E] gives each of E matrices a scale of its own.

    mx.dequantize takes one global scale per call. In a training step, the result has no gradient on CUDA.
    """
    if global_scale is None:
        numbers = dtype or scales.dtype
        if biases is not None and unpacking.serves(w, scales, biases, numbers, **packing):
            return unpacking.unpack([w, scales, biases], packing["group_size"], packing["bits"], numbers)
        if biases is not None and _divides_words(**packing):
            return _shifted(w, scales, biases, packing["group_size"], packing["bits"]).astype(numbers)
        return mx.dequantize(w, scales, biases, dtype=dtype, **packing)
    matrices = [
        mx.dequantize(w[i], scales[i], None, global_scale=global_scale[i], dtype=dtype, **packing)
        for i in range(w.shape[0])
    ]
    return mx.stack(matrices)


def _divides_words(bits: int | None = None, group_size: int | None = None, mode: str = "affine") -> bool:
    """Whether words hold whole numbers of so many bits, with a scale and a bias, and a CPU unpacks them."""
    return mode == "affine" and backend.computes_in_fp32() and bool(group_size and bits and 32 % bits == 0)


def _shifted(w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int) -> mx.array:
    """Return mx.dequantize in the scales' dtype, with the same bits; MLX makes arrays for each of a word's numbers."""
    numbers = (w[..., None] >> mx.arange(0, 32, bits, dtype=mx.uint32)) & (2**bits - 1)
    groups = numbers.reshape(*scales.shape, group_size).astype(scales.dtype)
    return (groups * scales[..., None] + biases[..., None]).reshape(*w.shape[:-1], -1)


# The number of rows from which converting a matrix in 16 bits pays.
FEWEST_ROWS = 2


def serves_narrow(x: mx.array, weight: mx.array) -> bool:
    """Whether `narrow_product` is to be used for rows x [..., in] and a matrix [out, in]."""
    narrow = x.dtype == weight.dtype and x.dtype in (mx.bfloat16, mx.float16)
    return narrow and backend.computes_in_fp32() and x.ndim > 1 and x.size >= FEWEST_ROWS * x.shape[-1]


def dense_product(x: mx.array, weight: mx.array) -> mx.array:
    """Return x W^T of x [..., in] and W [out, in], with both gradients, in the way that is fast on this device."""
    return narrow_product(x, weight) if serves_narrow(x, weight) else x @ weight.T


def narrow_product(x: mx.array, weight: mx.array) -> mx.array:
    """Return x W^T of x [..., in] and W [out, in], both in one dtype of 16 bits, in that dtype, with both gradients."""

    def forward(x: mx.array, weight: mx.array) -> mx.array:
        return rows_times(x, [weight], None, True)

    def backward(primals: Any, dy: mx.array, _output: mx.array) -> list[mx.array]:
        x, weight = primals
        # MLX is lazy: the gradient of a frozen matrix is never computed.
        rows = x.reshape(-1, x.shape[-1]).astype(mx.float32)
        d_weight = dy.reshape(-1, dy.shape[-1]).astype(mx.float32).T @ rows
        return [rows_times(dy, [weight], None, False), d_weight.astype(weight.dtype)]

    return with_gradient(forward, backward)(x, weight)
