"""How much error an implementation may show: the one table, for the tests and for the check before first use.

Bounds are the largest error of an output or gradient over its own largest element.
"""

from __future__ import annotations

# fp32 against float64: usual inputs; one repeated key; beta near 2 with open gates, where errors grow.
EASY, REPEATED_KEY, OVERSHOOTING = 2e-6, 2e-5, 5e-5

# Inside everything is fp32, so half precision costs the rounding of the result alone (half a unit in the last place).
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}

# The fused kernels keep states and their gradients in bf16 where the inputs are: one rounding more.
STATE_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 0.0}


def fused_bound(bound: float, dtype: str) -> float:
    """What the fused kernels may show where fp32 may show `bound`."""
    return bound + ROUNDING[dtype] + STATE_ROUNDING[dtype]


# Relative norms of errors. In fp32 the fused kernels stay under this, or under chunk's own error in the same case; in
# bf16 under so many times naive's, which rounds its outputs alone, or times what that rounding is.
FUSED_NORM, FUSED_BF16, BF16_NORM = 1e-6, 2.0, 1.7e-3

# d(log_g) in bf16 of two cuts with the same chunks: sums in another order, and now and then another bf16 after them.
FUSED_CUTS = 5e-4

# In fp32 a state is rounded once a chunk: what that leaves of its own and its gradient's after 300 open gates.
FUSED_STATE_NORM = 2.5e-7


def fused_bf16_norm(naive: float) -> float:
    """The relative norm that the fused kernels' error may have in bf16, where naive's is `naive`."""
    return FUSED_BF16 * max(naive, BF16_NORM)


# MLX multiplies fp32 matrices in TF32 on NVIDIA GPUs unless MLX_ENABLE_TF32=0: 10 bits of mantissa in each operand.
TF32 = 2.0**-9
