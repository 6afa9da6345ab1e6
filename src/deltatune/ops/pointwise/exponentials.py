"""Activations and softmax for CPUs on which MLX takes the exponential of one number at a time.

There MLX's exp and sigmoid take 15 to 40 ns an element, while an addition or multiplication of arrays takes 0.15 to
0.35 ns. So the exponential is computed from those, as 2^n e^r with a polynomial in r, |r| <= ln 2 / 2 (W. J. Cody and
W. Waite, Software Manual for the Elementary Functions, 1980). On Apple's CPUs MLX uses vectors itself.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import Any

import mlx.core as mx

from ...machine import backend
from ..recomputation import is_small_case, note

# These constants are arrays made once, because MLX makes a buffer of every Python number in an expression.
_ONE, _LOG2_E = mx.array(1.0), mx.array(1.4426950408889634)
# e^x is 0 where x is -88 or less, and grows no further from 87 on: fp32 would underflow or overflow.
_LOWEST, _HIGHEST = mx.array(-88.0), mx.array(87.0)
# ln 2 in two parts, of which the first times an integer below 2^9 is exact in fp32.
_LN2_HIGH, _LN2_LOW = mx.array(0.693359375), mx.array(-2.12194440e-4)
# Adding this number to x rounds x to an integer, which is then in the lowest bits; subtracting it gives the integer.
# It is 2^23 to 2^24, a multiple of 2^9, and short: mlx 0.31.2 writes six digits of a constant into compiled kernels.
_ROUNDING = mx.array(1.28e7)
_EXPONENT_BIAS, _MANTISSA_BITS = mx.array(127, mx.int32), mx.array(23, mx.int32)
# 1 + r + r^2 (...): the polynomial of degree 5 with the least error for |r| <= ln 2 / 2, which is 1.1e-7 of e^r.
_POLYNOMIAL = (*(mx.array(value) for value in (0.008312468, 0.041890256, 0.16667116, 0.4999923)), _ONE, _ONE)
# Each operation takes some microseconds, however small its arrays are; there are 24 in place of one.
_FEWEST = 2**13


def serves(*arrays: mx.array) -> bool:
    """Whether the functions of this module are to be used: for large fp32 arrays on a CPU that is not Apple's."""
    served = large_enough(arrays[0]) and _by_operations(*arrays)
    if served:
        note("exponentials")
    return served


def large_enough(x: mx.array) -> bool:
    """Whether an array is worth the operations; a small case of a record always is."""
    return x.size >= _FEWEST or is_small_case()


def _by_operations(*arrays: mx.array) -> bool:
    """Whether MLX would take the exponentials of these arrays one at a time, and they are fp32."""
    one_at_a_time = backend.device() == "cpu" and sys.platform != "darwin"
    return one_at_a_time and all(x.dtype == mx.float32 for x in arrays)


def exponential(x: mx.array) -> mx.array:
    """Return e^x for x <= 87 in fp32, with a relative error below 3e-7; it is 0 where x is -88 or less."""
    x = mx.maximum(x, _LOWEST)
    shifted = x * _LOG2_E + _ROUNDING
    n = shifted - _ROUNDING
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    value = r * _POLYNOMIAL[0] + _POLYNOMIAL[1]
    for coefficient in _POLYNOMIAL[2:]:
        value = value * r + coefficient
    # The bits of 2^n hold n + 127 above those of the mantissa; for n = -127 they are those of 0.
    return value * ((shifted.view(mx.int32) + _EXPONENT_BIAS) << _MANTISSA_BITS).view(mx.float32)


def sigmoid(x: mx.array) -> mx.array:
    """Return 1 / (1 + e^-x), without a gradient rule of its own; in fp32 its relative error is below 3e-7."""
    if not _by_operations(x):
        return mx.sigmoid(x)
    return mx.reciprocal(exponential(mx.minimum(-x, _HIGHEST)) + _ONE)


def silu(x: mx.array) -> mx.array:
    """Return x * sigmoid(x). Its gradient keeps the result and the sigmoid."""
    return _silu(x)[0]


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x, for arrays of one shape and dtype. Its gradient keeps both and the sigmoid."""
    return _swiglu(gate, x)[0]


def gelu_tanh(x: mx.array) -> mx.array:
    """Return x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. Its gradient keeps x, the result and a sigmoid."""
    return _gelu_tanh(x)[0]


def softmax(scores: mx.array) -> mx.array:
    """Return the softmax of fp32 scores along the last axis; one of 88 or more below its row's largest gets exactly 0.

    The scores must fit in a CPU's caches: on larger arrays so many operations take as long as MLX's exponential.
    """
    exponentials = exponential(scores - scores.max(axis=-1, keepdims=True))
    return exponentials * mx.reciprocal(exponentials.sum(axis=-1, keepdims=True))


def _silu_forward(x: mx.array) -> list[mx.array]:
    sigmoid_of_x = sigmoid(x)
    return [x * sigmoid_of_x, sigmoid_of_x]


def _silu_backward(_primals: Any, cotangents: Any, outputs: Any) -> mx.array:
    y, sigmoid_of_x = outputs
    return cotangents[0] * (sigmoid_of_x + y * (_ONE.astype(y.dtype) - sigmoid_of_x))


def _swiglu_forward(gate: mx.array, x: mx.array) -> list[mx.array]:
    sigmoid_of_gate = sigmoid(gate)
    return [gate * sigmoid_of_gate * x, sigmoid_of_gate]


def _swiglu_backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
    (gate, x), d, sigmoid_of_gate = primals, cotangents[0], outputs[1]
    of_gate = gate * sigmoid_of_gate
    return [d * x * (sigmoid_of_gate + of_gate * (_ONE.astype(x.dtype) - sigmoid_of_gate)), d * of_gate]


@cache
def _factors_of_gelu() -> tuple[mx.array, mx.array]:
    """Return a and b of gelu_tanh(x) = x sigmoid(x (a + b x^2)): 1 + tanh(u) is 2 sigmoid(2 u)."""
    linear = 2 * math.sqrt(2 / math.pi)
    return mx.array(linear), mx.array(0.044715 * linear)


def _gelu_tanh_forward(x: mx.array) -> list[mx.array]:
    linear, cubic = _factors_of_gelu()
    sigmoid_of_x = sigmoid(x * (linear + cubic * (x * x)))
    return [x * sigmoid_of_x, sigmoid_of_x]


def _gelu_tanh_backward(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
    x, (y, sigmoid_of_x), (linear, cubic) = primals, outputs, _factors_of_gelu()
    slope = linear + 3 * cubic * (x * x)
    return cotangents[0] * (sigmoid_of_x + y * (_ONE - sigmoid_of_x) * slope)


_silu: Any = mx.custom_function(_silu_forward)
_silu.vjp(_silu_backward)
_swiglu: Any = mx.custom_function(_swiglu_forward)
_swiglu.vjp(_swiglu_backward)
_gelu_tanh: Any = mx.custom_function(_gelu_tanh_forward)
_gelu_tanh.vjp(_gelu_tanh_backward)
