"""The sum of the squares of many arrays, as one launch for each array, which reads it once.

MLX's operations would write an array of 16 bits again in fp32, and its squares, before they sum them.
train/updates/optimizer.py takes the norm of all gradients with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..kernels.launch import Arrays, Device, Outputs, forced
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator
from ..operator.measure import as_float64, random_arrays
from .passes import BOUNDS, by_lane, size_of

# The fewest lanes of a launch, which make one block, and the most, which fill the largest GPU.
_FEWEST, _MOST = 128, 2**17
# How many elements a lane takes at a time, and how many lanes share a sum.
_LANE, _GROUP = 8, 32


def sum_of_squares(arrays: Sequence[mx.array]) -> mx.array:
    """Return the sum of the squares of all elements, [] fp32, summed in fp32; there is no gradient."""
    dtypes = {array.dtype for array in arrays}
    if not forced() and not all(dtype in BOUNDS and OPERATOR.serves(dtype) for dtype in dtypes):
        return _with_mlx(arrays)
    lanes = _FEWEST
    while lanes < _MOST and lanes * _LANE < max(array.size for array in arrays):
        lanes *= 2
    sums = mx.zeros(lanes // _GROUP)
    # Each launch adds to the sums of the one before, so that no sums wait in memory for those of the other arrays.
    for x in arrays:
        inputs: Arrays = {"x": x, "before": sums}
        outputs: Outputs = {"sums": (sums.shape, mx.float32)}
        (sums,) = by_lane("squares_added", inputs, outputs, (size_of("x", x),), lanes, (lanes,))()
    return sums.sum()


def _with_mlx(arrays: Sequence[mx.array]) -> mx.array:
    """The same sum by MLX's operations. Stacking the arrays' sums would need a live buffer for each of them."""
    total, *more = (array.astype(mx.float32).square().sum() for array in arrays)
    for square in more:
        total = total + square
    return total


def trial_case(dtype: mx.Dtype) -> Case[Device]:
    """Return the case of arrays of this dtype."""
    # Some lanes take two pieces and others one, and the last elements are no piece.
    arrays = random_arrays([((_MOST * _LANE + 1031,), dtype), ((3, 67), dtype)])

    def truth() -> list[np.ndarray]:
        return [np.array(sum(np.square(as_float64(array)).sum() for array in arrays))]

    return Case(
        name=f"the sum of squares of {dtype}",
        results=("sum",),
        call=by_kernels(lambda: [sum_of_squares(arrays)]),
        truth=truth,
        bound=BOUNDS[mx.float32],
    )


OPERATOR = KernelOperator("sums of squares", trial_case)
