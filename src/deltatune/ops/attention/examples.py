"""The sizes on which the doctor compares `blocked` and the kernels with the definition: heads of released models."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from ...machine import backend
from ..trial.case import judged
from ..trial.verdicts import Verdict
from .blocked import attention_blocked
from .call import AttentionCall
from .trial_case import KernelShape, trial_case

# Grouped heads of 256, latent attention, a vision tower, and windows with sinks.
HEADS = (
    KernelShape("", 256, 256, "bfloat16", grouped=True, causal=True, windowed=False, segmented=False, with_sinks=False),
    KernelShape("", 192, 128, "bfloat16", grouped=False, causal=True, windowed=False, segmented=True, with_sinks=False),
    KernelShape("", 72, 72, "bfloat16", grouped=False, causal=False, windowed=False, segmented=True, with_sinks=False),
    KernelShape("", 64, 64, "float32", grouped=True, causal=True, windowed=True, segmented=False, with_sinks=True),
)
# Tokens of a call: long enough for every implementation.
_LENGTH = 1024


def calls() -> list[AttentionCall]:
    """Return a call of each class of HEADS."""
    return [_call(shape) for shape in HEADS]


def compare_blocked() -> list[Verdict]:
    """Compare `blocked` with the definition."""
    shapes = [replace(shape, machine=backend.device()) for shape in HEADS]
    return [judged(trial_case(shape), attention_blocked, "blocked") for shape in shapes]


def _call(shape: KernelShape) -> AttentionCall:
    dtype = getattr(mx, shape.dtype)
    q = mx.zeros((1, 2, _LENGTH, shape.size), dtype)
    k = mx.zeros((1, 1 if shape.grouped else 2, _LENGTH, shape.size), dtype)
    v = mx.zeros((*k.shape[:3], shape.value_size), dtype)
    segments = mx.zeros((1, _LENGTH), mx.int32) if shape.segmented else None
    window = 4 if shape.windowed else None
    sinks = mx.zeros((2,)) if shape.with_sinks else None
    return AttentionCall(q, k, v, shape.causal, segments, window, sinks, None, shape.size**-0.5)
