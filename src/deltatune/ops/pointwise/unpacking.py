"""Unpacks quantised matrices, where MLX's own kernel on CUDA reads a byte at a time and writes two numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..functional import not_differentiated_again
from ..kernels.launch import Arrays, Device, Launch, Outputs
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator, KernelWorkload
from ..operator.measure import in_float64, random_arrays
from .passes import BOUNDS, LEAST, by_lane, size_of

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
# The most words of a matrix: the kernel counts bytes in 32 bits.
MOST = 2**30
# The pieces of eight numbers that a lane unpacks.
_PIECES = 4


def unpack(matrix: Sequence[mx.array], group_size: int, bits: int, dtype: mx.Dtype) -> mx.array:
    """Return the numbers of a matrix, scale q + bias in fp32 and rounded once, with the gradients of mx.dequantize.

    The matrix is words [..., in bits / 32] uint32, and scales and biases [..., in / group_size], floats of one dtype.
    """

    def forward(w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return _pass(w, scales, biases, group_size, bits, dtype)()[0]

    def backward(primals: Any, cotangent: mx.array, _output: mx.array) -> list[mx.array]:
        def plain(w: mx.array, scales: mx.array, biases: mx.array) -> list[mx.array]:
            return [mx.dequantize(w, scales, biases, group_size, bits).astype(dtype)]

        # All arrays are arguments: mx.vjp walks through everything that an array which is none was computed from.
        _, (_, *gradients) = mx.vjp(plain, list(primals), [cotangent])
        return [mx.zeros_like(primals[0]), *gradients]

    return not_differentiated_again(forward, backward)(*matrix)


def covers(w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str) -> bool:
    """Whether the kernel can unpack such a matrix."""
    if mode != "affine" or biases is None or group_size not in GROUP_SIZES or bits not in BITS:
        return False
    floats = scales.dtype in BOUNDS and (biases.dtype, biases.shape) == (scales.dtype, scales.shape)
    fits = w.shape[:-1] == scales.shape[:-1] and w.shape[-1] * 32 == scales.shape[-1] * group_size * bits
    return floats and fits and w.dtype == mx.uint32 and 0 < w.size <= MOST


def serves(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    dtype: mx.Dtype,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
) -> bool:
    """Whether `unpack` is to be used: it covers these matrices, is faster, and was found right on this machine."""
    if dtype not in BOUNDS or not group_size or not bits:
        return False
    large = w.size * 32 // bits >= LEAST
    if not large or not covers(w, scales, biases, group_size, bits, mode):
        return False
    return OPERATOR.serves(group_size, bits, scales.dtype, dtype)


def _pass(w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int, dtype: mx.Dtype) -> Launch:
    inputs: Arrays = {"w": w, "scales": scales, "biases": biases}
    outputs: Outputs = {"y": ((*w.shape[:-1], scales.shape[-1] * group_size), dtype)}
    pieces = scales.size * group_size // 8
    count = f"(unsigned)({size_of('scales', scales)} * {group_size // 8})"
    lanes = -(-pieces // (32 * _PIECES)) * 32
    return by_lane("unpacked_groups", inputs, outputs, (count,), lanes, (bits, group_size, _PIECES))


def trial_case(group_size: int, bits: int, stored_dtype: mx.Dtype, dtype: mx.Dtype, rows: int = 7) -> Case[Device]:
    """Return the case of such matrices, of a size at which the last lanes have nothing to do."""
    groups = 384 // group_size
    scales, biases = random_arrays([((rows, groups), stored_dtype)] * 2)
    words = mx.array(np.random.default_rng(3).integers(0, 2**32, (rows, 384 * bits // 32), np.uint32))

    def plain(pair: Sequence[mx.array]) -> list[mx.array]:
        scales, biases = pair
        return [mx.dequantize(words, scales, biases, group_size, bits)]

    return Case(
        name=f"unpacking {bits} bits in groups of {group_size} to {dtype}",
        results=("numbers",),
        call=by_kernels(lambda: [unpack([words, scales, biases], group_size, bits, dtype)]),
        truth=lambda: in_float64(plain, [scales, biases]),
        bound=BOUNDS[dtype],
        like=[mx.zeros((rows, 384), dtype)],
    )


def _workloads(quick: bool) -> list[KernelWorkload]:
    trial = partial(trial_case, 64, 4, mx.float32, mx.float32, 90 if quick else 87_000)
    return [KernelWorkload("packed weights", mx.float32, trial)]


OPERATOR = KernelOperator("passes", trial_case, workloads=_workloads)
