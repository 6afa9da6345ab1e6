"""How much error an implementation of attention may show: the one table, for the tests and the trial before first use.

Bounds of the trial are the largest error of an output or gradient over its own largest element; those of the tests are
norms of errors over norms. Both start from float64.
"""

from __future__ import annotations

from ..gated_delta.tolerances import ROUNDING

# fp32: scores of usual size, sums of up to a thousand products and weights.
NORMAL = 2e-6

# A score's own rounding, of its size times this, is the relative error of its weight: 2^-24 for the sum that made it
# and as much again for the logarithm that is taken from it, with as many for their products with log2(e).
OF_A_SCORE = 4 * 2.0**-24


def fp32_bound(largest_score: float) -> float:
    """What fp32 may show where scores reach `largest_score`."""
    return NORMAL + OF_A_SCORE * largest_score


def fused_bound(dtype: str) -> float:
    """What the fused kernels may show in their trial: weights and their gradients are rounded to the inputs' type
    before they are multiplied, results once more."""
    return NORMAL + 2 * ROUNDING[dtype]


def half_norm(dtype: str) -> float:
    """What the norm of an error may be in half precision.

    Rounding a number is off by 0.29 of a last place on average (root of the mean square), which is 0.29 to 0.58 of
    ROUNDING of the number itself; a gradient meets two such roundings, of weights or their gradients and of itself.
    """
    return NORMAL + 2**0.5 * 0.58 * ROUNDING[dtype]
