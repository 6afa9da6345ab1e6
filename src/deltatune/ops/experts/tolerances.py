"""How much error the expert block may show: the largest error of an output or gradient over its own largest element."""

from __future__ import annotations

# fp32 against float64.
EXACT = 1e-6

# On a CPU everything inside is fp32: half precision costs the rounding of its results alone.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
