"""How much error the expert block and its kernels may show, for the tests and for the trial before first use."""

from __future__ import annotations

# fp32 against float64: norm of the error over the norm; largest error over the largest element, where autodiff of the
# dense computation in fp32 shows 1.1e-6 and the block 1.2e-6.
EXACT, EXACT_ELEMENT = 1e-6, 2e-6

# On a CPU everything inside is fp32: half precision costs the rounding of its results alone.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}

# On a GPU nine follow one another, in the worst case each the whole way: product, bias, adapter, activation, product,
# bias, adapter, score, sum. In the norm they add up like errors that know nothing of one another: to their root.
ROUNDINGS_ON_GPU = 9

# The kernels for sorted rows, largest error over the largest element: one rounding of a result; sums in fp32.
GROUPED = {"bfloat16": 2.0**-8 + 2e-6, "float16": 2.0**-11 + 2e-6, "float32": 2e-6, "gradient": 2e-6}

# On a GPU: for every 16 terms, tensor cores cut off what is below a sum's last place, where the host machine rounds.
ON_TENSOR_CORES = 2e-5

# A block in bf16 throughout, as on CUDA, against float64: norm of the error over the norm, of y and each gradient.
# Every intermediate result is rounded to 2^-9; the worst of them shows 6.8e-3.
NARROW_NORM = 1e-2
