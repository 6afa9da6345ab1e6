"""Joins many small arrays in one launch, where mx.concatenate makes one launch for each of them.

train/updates/bundles.py joins the parameters and gradients of a step with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..kernels.launch import Device, forced
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator, in_each_dtype
from .passes import by_lane, size_of

# The most arrays of one launch, each of which is a step of a recursion in the kernel. (Metal allows fewer buffers.)
MOST = 64


def end_to_end(arrays: Sequence[mx.array]) -> mx.array:
    """Return the numbers of all arrays, of any shape, one after another, [n] fp32; there is no gradient.

    Arrays of several dtypes are joined by mx.concatenate.
    """
    dtypes = {array.dtype for array in arrays}
    if not forced() and (len(arrays) < 2 or len(dtypes) > 1 or not OPERATOR.serves(*dtypes)):
        return mx.concatenate([array.reshape(-1) for array in arrays]).astype(mx.float32)
    parts = [_joined(arrays[start : start + MOST]) for start in range(0, len(arrays), MOST)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _joined(arrays: Sequence[mx.array]) -> mx.array:
    inputs = {f"x{i}": array for i, array in enumerate(arrays)}
    total = sum(array.size for array in arrays)
    pairs = ", ".join(f"{name}, (int)({size_of(name, array)})" for name, array in inputs.items())
    return by_lane("end_to_end", inputs, {"y": ((total,), mx.float32)}, ("at", "y", pairs), total)()[0]


def trial_case(dtype: mx.Dtype) -> Case[Device]:
    """Return the case of arrays of this dtype; the results must equal them exactly."""
    arrays = [mx.arange(start, start + size).astype(dtype) for start, size in ((0, 130), (7, 1), (40, 33))]
    return Case(
        name=f"{dtype} end to end",
        results=("joined",),
        call=by_kernels(lambda: [end_to_end(arrays)]),
        truth=lambda: [mx.concatenate(arrays).astype(mx.float32)],
        bound=0.0,
    )


OPERATOR = KernelOperator("passes", trial_case, workloads=lambda quick: in_each_dtype("end to end", trial_case))
