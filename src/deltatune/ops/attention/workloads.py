"""Calls of attention at the sizes of released models, for the doctor and the self-test."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...machine import backend
from ..operator.case import Case, judged
from ..operator.measure import relative_norm
from ..operator.verdicts import Verdict
from .blocked import attention_blocked
from .trial_case import NORMAL, AttentionCall, Drawn, Implementation, KernelShape, case_of, drawn, half_norm, trial_case


@dataclass(frozen=True)
class AttentionWorkload:
    """A call of attention with one row; `ratio` heads of q read one key head where heads are grouped."""

    name: str
    shape: KernelShape
    length: int
    key_heads: int = 4
    ratio: int = 2

    def drawn(self) -> Drawn:
        """Draw the arguments."""
        return drawn(self.shape, self.length, self.key_heads, self.ratio)

    def call(self) -> AttentionCall:
        """The call, for the choice of an implementation."""
        (q, k, v, *sinks), _, options = self.drawn()
        segments, window = options.get("segments"), options.get("window")
        sink = sinks[0] if sinks else None
        return AttentionCall(q, k, v, self.shape.causal, segments, window, sink, None, options["scale"])

    def case(self, implementation: str) -> Case[Implementation]:
        """The case, with the bounds on relative norms that hold for every implementation (tolerances.py)."""
        bound = NORMAL if self.shape.dtype == "float32" else half_norm(self.shape.dtype)
        return replace(case_of(self.shape, self.drawn()), name=self.name, bound=bound, error=relative_norm)


def workloads(quick: bool) -> list[AttentionWorkload]:
    """The workloads, with the heads of released models; `quick` makes them few and small."""
    length, part = (70, 4) if quick else (300, 1)
    wide, latent = 256 // part, (192 // part, 128 // part)
    grouped = KernelShape("", wide, wide, "bfloat16", grouped=True)
    packed = replace(grouped, dtype="float32", segmented=True)
    sinks = KernelShape("", 64, 64, "float32", windowed=True, with_sinks=True)
    image = KernelShape("", 72, 72, "bfloat16", causal=False, segmented=True)
    return [
        AttentionWorkload("grouped heads, bf16", grouped, length, 2, 4),
        AttentionWorkload("packed, fp32", packed, length, 2, 4),
        AttentionWorkload("latent, bf16", KernelShape("", *latent, "bfloat16", segmented=True), length),
        AttentionWorkload("windows and sinks, fp32", sinks, length, 8),
        AttentionWorkload("an image, bf16", image, length),
    ]


# Grouped heads of 256, latent attention, a vision tower, windows with sinks, and towers in fp32, of which the narrow
# ones have the largest errors beside their results.
HEADS = (
    KernelShape("", 256, 256, "bfloat16", grouped=True),
    KernelShape("", 192, 128, "bfloat16", segmented=True),
    KernelShape("", 72, 72, "bfloat16", causal=False, segmented=True),
    KernelShape("", 64, 64, "float32", grouped=True, windowed=True, with_sinks=True),
    *(KernelShape("", size, size, "float32", causal=False) for size in (32, 72, 80)),
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
