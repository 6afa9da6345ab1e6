"""Looks for wrong quantised expert products on sizes that do not fill a tile.

The fault is in mlx issues 3856 and 3887, and affects M5 chips before mlx 0.32.1. On an NVIDIA GPU MLX would compile
its kernels for these sizes for minutes, and deltatune trains without them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...machine import backend
from ...ops.trial.measure import relative_error
from .fault import ABSENT, NOT_RUN, PRESENT, Fault

NAME = "gather_qmm on ragged sizes"
_EXPERTS, _OUT, _GROUP = 4, 64, 32
# Inner sizes that are no multiples of 64, and a number of rows beyond 16 bits that is no multiple of a tile.
_INNER, _ROWS = (32, 96, 160), 32_768 + 33
# A GPU rounds a bf16 product once. MLX's CPU product sums in the dtype of x, so that the CPU is probed in fp32.
_BOUND = {"bfloat16": 1e-2, "float32": 1e-5}


def find() -> Fault:
    """Compare with a product of the dequantised weights, on a CPU and on an Apple GPU, which also gets many rows."""
    here = backend.device()
    if here == "cuda":
        return Fault(NAME, NOT_RUN, "the fault is Apple's, and training on NVIDIA GPUs calls no such product")
    dtype = "float32" if here == "cpu" else "bfloat16"
    errors = {f"K = {inner}": _error(80, inner, dtype) for inner in _INNER}
    if here != "cpu":
        errors[f"{_ROWS:,} rows"] = _error(_ROWS, 64, dtype)
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] <= _BOUND[dtype]:
        return Fault(NAME, ABSENT, f"right for {', '.join(errors)}", errors[worst])
    where = ", ".join(name for name, error in errors.items() if error > _BOUND[dtype])
    return Fault(NAME, PRESENT, f"wrong for {where}: quantised expert layers go wrong; update mlx", errors[worst])


def _error(rows: int, inner: int, dtype: str) -> float:
    weights = mx.random.normal((_EXPERTS, _OUT, inner), key=mx.random.key(0))
    packed, *scales_and_biases = mx.quantize(weights, _GROUP, 4)
    scales, biases = (array.astype(getattr(mx, dtype)) for array in scales_and_biases)
    x = mx.random.normal((rows, 1, inner), key=mx.random.key(1)).astype(getattr(mx, dtype))
    indices = mx.sort(mx.random.randint(0, _EXPERTS, (rows,), key=mx.random.key(2)).astype(mx.uint32))
    options: dict[str, Any] = {
        "rhs_indices": indices,
        "transpose": True,
        "group_size": _GROUP,
        "bits": 4,
        "sorted_indices": True,
    }
    computed = mx.gather_qmm(x, packed, scales, biases, **options)[:, 0]
    plain = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), _GROUP, 4)
    # The reference multiplies every row with every expert and selects afterwards, so that it needs no gather.
    every = x[:, 0].astype(mx.float32) @ plain.reshape(-1, inner).T
    expected = mx.take_along_axis(every.reshape(rows, _EXPERTS, _OUT), indices.reshape(-1, 1, 1), axis=1)[:, 0]
    return relative_error(computed, expected)
