"""Multiplies rows by a matrix in 16 bits on a CPU, in fp32.

A BLAS has products in fp32 alone. MLX computes those in 16 bits by a loop of its own, which is some thirty times slower
(docs/decisions/cpu.md). Here one slab of the matrix after another is converted to fp32, forward and backward, so that
no matrix is held twice. The result is rounded once, to 16 bits.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...machine import backend
from .quantized_product import rows_times

# The number of rows from which the conversion pays.
FEWEST_ROWS = 2


def serves(x: mx.array, weight: mx.array) -> bool:
    """Whether `narrow_product` is to be used for rows x [..., in] and a matrix [out, in]."""
    narrow = x.dtype == weight.dtype and x.dtype in (mx.bfloat16, mx.float16)
    return narrow and backend.computes_in_fp32() and x.ndim > 1 and x.size >= FEWEST_ROWS * x.shape[-1]


def dense_product(x: mx.array, weight: mx.array) -> mx.array:
    """Return x W^T of x [..., in] and W [out, in], with both gradients, in the way that is fast on this device."""
    return narrow_product(x, weight) if serves(x, weight) else x @ weight.T


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

    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    return function(x, weight)
