"""The sizes on which the doctor compares `chunk` with the recurrence, and the kernels with `chunk`."""

from __future__ import annotations

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
    return [Call.of_class(shape) for shape in MODELS]


def compare_chunk() -> list[Verdict]:
    """Compare `chunk` with the recurrence."""
    return [judged(trial_case(shape, by_recurrence=True), gated_delta_chunk, "chunk") for shape in SMALL]
