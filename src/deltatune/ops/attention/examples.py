"""The sizes on which the doctor compares `blocked` and the kernels with the definition: heads of released models."""

from __future__ import annotations

from dataclasses import replace

from ...machine import backend
from ..trial.case import judged
from ..trial.verdicts import Verdict
from .blocked import attention_blocked
from .call import AttentionCall
from .trial_case import KernelShape, trial_case
from .workloads import AttentionWorkload

# Grouped heads of 256, latent attention, a vision tower, and windows with sinks.
HEADS = (
    KernelShape("", 256, 256, "bfloat16", grouped=True),
    KernelShape("", 192, 128, "bfloat16", segmented=True),
    KernelShape("", 72, 72, "bfloat16", causal=False, segmented=True),
    KernelShape("", 64, 64, "float32", grouped=True, windowed=True, with_sinks=True),
)
# Tokens of a call: long enough for every implementation.
_LENGTH = 1024


def calls() -> list[AttentionCall]:
    """Return a call of each class of HEADS."""
    return [AttentionWorkload(str(shape), shape, _LENGTH, 1 if shape.grouped else 2).call() for shape in HEADS]


def compare_blocked() -> list[Verdict]:
    """Compare `blocked` with the definition."""
    shapes = [replace(shape, machine=backend.device()) for shape in HEADS]
    return [judged(trial_case(shape), attention_blocked, "blocked") for shape in shapes]
