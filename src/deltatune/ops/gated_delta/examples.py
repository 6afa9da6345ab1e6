"""The sizes on which the doctor compares `chunk` with the recurrence, and the kernels with `chunk`."""

from __future__ import annotations

import mlx.core as mx

from ..trial.case import judged
from ..trial.verdicts import Verdict
from .call import Call
from .chunk import gated_delta_chunk
from .trial_case import ShapeClass, trial_case

# Small sizes, on which the recurrence takes little time.
SMALL = (
    ShapeClass(2, 4, 64, 64, "float32"),
    ShapeClass(2, 4, 64, 64, "bfloat16", masked=True, segmented=True),
    ShapeClass(2, 2, 32, 32, "float32", per_channel=True),
)
# Sizes of released models; in fp32 the heads are half as wide, for which an NVIDIA GPU's kernels compile in a tenth of
# the time.
MODELS = (
    ShapeClass(16, 16, 128, 128, "bfloat16"),
    ShapeClass(16, 32, 128, 128, "bfloat16", segmented=True),
    ShapeClass(16, 16, 64, 64, "float32", masked=True),
    ShapeClass(32, 32, 128, 128, "bfloat16", per_channel=True),
)


def calls() -> list[Call]:
    """Return a call of each class of MODELS, with one token."""
    return [_call(shape) for shape in MODELS]


def compare_chunk() -> list[Verdict]:
    """Compare `chunk` with the recurrence."""
    return [judged(trial_case(shape, by_recurrence=True), gated_delta_chunk, "chunk") for shape in SMALL]


def _call(shape: ShapeClass) -> Call:
    dtype = getattr(mx, shape.dtype)
    q = mx.zeros((1, 1, shape.key_heads, shape.key_size), dtype)
    v = mx.zeros((1, 1, shape.value_heads, shape.value_size), dtype)
    gates = (1, 1, shape.value_heads, shape.key_size) if shape.per_channel else (1, 1, shape.value_heads)
    return Call(q, q, v, mx.zeros(gates), shape.masked, shape.segmented)
