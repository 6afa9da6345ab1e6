"""The one table of errors that an implementation of attention may show, for the tests and the check before first use.

Bounds of the check limit the largest error of an output or gradient relative to its own largest element. Bounds of the
tests limit the norm of the error relative to the norm of the truth, which is computed in float64.
"""

from __future__ import annotations

from ..operator.measure import ROUNDING

# For fp32, scores of usual size, and sums of up to a thousand products and weights.
NORMAL = 2e-6

# A score's rounding error is the relative error of its weight. Per unit of the score it is 2^-24 for the sum that gives
# the score, 2^-24 for the logarithm that is subtracted from it, and as much for the product of either with log2(e).
OF_A_SCORE = 4 * 2.0**-24


def fp32_bound(largest_score: float) -> float:
    """Return the error that fp32 may show where scores reach `largest_score`."""
    return NORMAL + OF_A_SCORE * largest_score


def fused_bound(dtype: str) -> float:
    """Return the error that the fused kernels may show in their check.

    Weights and their gradients are rounded to the inputs' dtype before they are multiplied, and so are the results.
    """
    return NORMAL + 2 * ROUNDING[dtype]


def half_norm(dtype: str) -> float:
    """Return the tolerance of the relative norm of an error in half precision.

    The root of the mean squared rounding error is 0.29 units in the last place, which is 0.29 to 0.58 of ROUNDING times
    the number. A gradient is rounded twice: first the weights or their gradients, then the result.
    """
    return NORMAL + 2**0.5 * 0.58 * ROUNDING[dtype]
