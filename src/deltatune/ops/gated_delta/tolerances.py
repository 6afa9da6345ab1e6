"""The one table of errors that an implementation may show, for the tests and for the check before its first use.

Unless a comment says otherwise, an error is the largest of an output or gradient, relative to its own largest element.
"""

from __future__ import annotations

from ..operator.measure import ROUNDING

# fp32 against float64, for usual inputs, for one repeated key, and for beta near 2 with gates of 1, where errors grow.
EASY = 2e-6
REPEATED_KEY = 2e-5
OVERSHOOTING = 5e-5

# A row of slow gates forgets nothing, so the errors of all its tokens add up: one rounding of fp32 for each of 512.
SLOW = 512 * 2.0**-24

# All arithmetic is fp32, so half precision adds only the rounding of the result. For bf16 inputs the fused kernels also
# save states and their gradients in bf16, which is one more rounding.
STATE_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 0.0}


def fused_bound(bound: float, dtype: str) -> float:
    """Return the error that the fused kernels may show in `dtype` where fp32 may show `bound`."""
    return bound + ROUNDING[dtype] + STATE_ROUNDING[dtype]


# Products in bf16 round both operands and their result. The longest way through a chunk, forward and backward, has 12
# of them, and independent roundings add up to the root of their number.
PRODUCTS_IN_BF16 = (3 * 12) ** 0.5

# Norms of errors relative to the norm of the truth. In fp32 the fused kernels stay under FUSED_NORM or under chunk's
# error; in bf16 under FUSED_BF16 times naive's error or BF16_NORM, the error of rounding the outputs to bf16.
FUSED_NORM = 1e-6
FUSED_BF16 = 2.0
BF16_NORM = 1.7e-3

# d(log_g) in bf16 between two tilings with equal chunks: sums differ in order, so now and then a rounding differs.
FUSED_CUTS = 5e-4

# The relative norm of the error of a state and of its gradient in fp32, rounded once per chunk, after 300 gates of 1.
FUSED_STATE_NORM = 2.5e-7


def fused_bf16_norm(naive: float) -> float:
    """Return the tolerance of the fused kernels' relative norm of error in bf16, given that of naive."""
    return FUSED_BF16 * max(naive, BF16_NORM)


# MLX multiplies fp32 matrices in TF32 (10 bits of mantissa per operand) on NVIDIA GPUs unless MLX_ENABLE_TF32=0.
TF32 = 2.0**-9
