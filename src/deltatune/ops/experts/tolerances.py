"""The errors that the expert block and its kernels may have, for the tests and for the trial before first use."""

from __future__ import annotations

# The block in fp32 against float64: the error's norm over the norm, and the largest error over the largest element.
# There, autodiff of the dense computation in fp32 shows 1.1e-6, and the block 1.2e-6.
EXACT = 1e-6
EXACT_ELEMENT = 2e-6

# On a CPU everything inside is in fp32, so that half precision costs only the rounding of the results.
# On a GPU nine results are rounded one after another: product, bias, adapter, activation, product, bias, adapter, score
# and sum. The largest error may be their sum; the norm grows with the root of their number, as of independent errors.
ROUNDINGS_ON_GPU = 9

# The kernels for sorted rows, which sum in fp32 and round the result once: the largest error over the largest element.
GROUPED = {"bfloat16": 2.0**-8 + 2e-6, "float16": 2.0**-11 + 2e-6, "float32": 2e-6, "gradient": 2e-6}

# On a GPU the largest error may be larger by this: tensor cores truncate the sum after every 16 terms.
ON_TENSOR_CORES = 2e-5

# A block in bf16 throughout, as on CUDA, against float64: the error's norm over the norm, of y and of each gradient.
# Every intermediate result is rounded to 2^-9, which gives 6.8e-3 at the worst of them.
NARROW_NORM = 1e-2
