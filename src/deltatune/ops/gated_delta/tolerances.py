"""How much error an implementation may show: the one table, for the tests and for the check before first use.

Bounds are the largest error of an output or gradient over its own largest element.
"""

from __future__ import annotations

# fp32 against float64: usual inputs; one repeated key; beta near 2 with open gates, where errors grow.
EASY, REPEATED_KEY, OVERSHOOTING = 2e-6, 2e-5, 5e-5

# Inside everything is fp32, so half precision costs the rounding of the result alone (half a unit in the last place).
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}

# The fused kernels keep what goes from one to the next in bf16 where the inputs are: one rounding more. The gate's
# gradient is a difference of such terms, larger than itself where errors grow.
KEPT = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 0.0}
KEPT_OVERSHOOTING = {"float32": 0.0, "bfloat16": 2.0**-6, "float16": 0.0}


def fused_bound(bound: float, dtype: str) -> float:
    """What the fused kernels may show where fp32 may show `bound`."""
    kept = KEPT_OVERSHOOTING if bound == OVERSHOOTING else KEPT
    return bound + ROUNDING[dtype] + kept[dtype]


# MLX multiplies fp32 matrices in TF32 on NVIDIA GPUs unless MLX_ENABLE_TF32=0: 10 bits of mantissa in each operand.
TF32 = 2.0**-9
