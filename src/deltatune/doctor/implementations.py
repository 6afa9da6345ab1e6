"""Measures whether each implementation of gated_delta and attention that may be chosen here computes right results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from ..machine import backend
from ..ops import attention
from ..ops.attention import attention_blocked, trial_case
from ..ops.attention.choice import AttentionCall
from ..ops.attention.trial_case import KernelShape
from ..ops.gated_delta import choice, gated_delta_chunk
from ..ops.gated_delta import trial_case as delta_case
from ..ops.gated_delta.choice import Call
from ..ops.gated_delta.tolerances import TF32
from ..ops.gated_delta.trial_case import ShapeClass
from ..ops.kernels.cubin import built_side_by_side
from ..ops.trial import candidates, timing
from ..ops.trial.candidates import Candidate, Operator
from ..ops.trial.case import judged
from ..ops.trial.verdicts import Verdict

# `chunk` is compared with the recurrence on small shapes, the others with `chunk` on shapes of released models; in fp32
# their heads are half as wide, for which an NVIDIA GPU's kernels compile in a tenth of the time.
_CHUNK = (
    ShapeClass(2, 4, 64, 64, "float32"),
    ShapeClass(2, 4, 64, 64, "bfloat16", masked=True, segmented=True),
    ShapeClass(2, 2, 32, 32, "float32", per_channel=True),
)
_MODELS = (
    ShapeClass(16, 16, 128, 128, "bfloat16"),
    ShapeClass(16, 32, 128, 128, "bfloat16", segmented=True),
    ShapeClass(16, 16, 64, 64, "float32", masked=True),
    ShapeClass(32, 32, 128, 128, "bfloat16", per_channel=True),
)
# Heads of released models: grouped heads of 256, latent attention, and a vision tower.
_HEADS = (
    KernelShape("", 256, 256, "bfloat16", grouped=True, causal=True, windowed=False, segmented=False, with_sinks=False),
    KernelShape("", 192, 128, "bfloat16", grouped=False, causal=True, windowed=False, segmented=True, with_sinks=False),
    KernelShape("", 72, 72, "bfloat16", grouped=False, causal=False, windowed=False, segmented=True, with_sinks=False),
    KernelShape("", 64, 64, "float32", grouped=True, causal=True, windowed=True, segmented=False, with_sinks=True),
)


@dataclass
class Finding:
    """What one implementation gave on one class of shapes.

    Args:
        implementation: Its name.
        shape: The class of shapes, in words.
        status: `right`, `TF32`, `wrong`, `refused` or `not covered`.
        detail: Why it has this status.
        errors: The largest error of each result, relative to the largest element.
        worst: The name of the result whose error is the largest part of what it may be.
        bound: The largest error allowed for that result.
    """

    implementation: str
    shape: str
    status: str
    detail: str
    errors: dict[str, float] = field(default_factory=dict)
    worst: str | None = None
    bound: float | None = None

    @property
    def wrong(self) -> bool:
        return self.status == "wrong"


def build(builders: ThreadPoolExecutor) -> None:
    """Let `builders` build the kernels that `findings` and `of_attention` try, where an NVIDIA GPU has any to build."""
    if backend.device() != "cuda":
        return
    with built_side_by_side(builders):
        for operator, calls in ((_GATED_DELTA, _delta_calls()), (_ATTENTION, _attention_calls())):
            for call in calls:
                candidate = operator.candidates()["fused"](call)
                if not isinstance(candidate, str) and candidate.checked is not None:
                    operator.operator().case_of(candidate.shape).call(candidate.checked)


def findings() -> list[Finding]:
    """Compare `chunk` with the recurrence, and each faster implementation with `chunk`."""
    names, _ = backend.gated_delta_candidates()
    fast = [name for name in ("fused", "native") if name in names or backend.device() != "cpu"]
    return of_chunk() + [_fast(_GATED_DELTA, name, call, names) for name in fast for call in _delta_calls()]


def of_chunk() -> list[Finding]:
    """Compare `chunk` with the recurrence."""
    return [_chunk(shape) for shape in _CHUNK]


def of_attention() -> list[Finding]:
    """Compare `blocked`, the fused kernels and, where it may serve, MLX's own attention with the definition."""
    names, _ = backend.attention_candidates()
    blocked = [judged(trial_case.trial_case(shape), attention_blocked, "blocked") for shape in _heads()]
    of_blocked = [_finding(verdict, "right" if verdict.passed else "wrong") for verdict in blocked]
    if backend.device() == "cpu":
        return of_blocked
    fast = [name for name in ("fused", "native") if name == "fused" or name in names]
    return of_blocked + [_fast(_ATTENTION, name, call, names) for name in fast for call in _attention_calls()]


@dataclass
class Times:
    """How long the right implementations take for a forward and a backward pass on one class of shapes.

    Args:
        calls: The operator and the class of shapes, in words.
        milliseconds: By implementation, the shortest time.
        changing: The implementations whose bits differ from run to run, so that they serve only where they are forced.
    """

    calls: str
    milliseconds: dict[str, float]
    changing: list[str]

    def __str__(self) -> str:
        times = self.milliseconds.items()
        return ", ".join(timing.words(name, ms / 1e3, name not in self.changing) for name, ms in times)


def times() -> list[Times]:
    """Time what findings() and of_attention() have found right, on a GPU."""
    if backend.device() == "cpu":
        return []
    of_delta = [_times(_GATED_DELTA, call, str(shape)) for call, shape in zip(_delta_calls(), _MODELS, strict=True)]
    return of_delta + [_times(_ATTENTION, call, call.words) for call in _attention_calls()]


def _times(examined: _Examined, call: Any, words: str) -> Times:
    operator, right = examined.operator(), {}
    for name, candidate_of in examined.candidates().items():
        candidate = candidate_of(call)
        if isinstance(candidate, str) or candidate.checked is None:
            continue
        if candidate.trusted or candidates.verdict_on(operator, name, candidate).passed:
            right[name] = candidate
    timed = {name: verdict for name, verdict in candidates.times(operator, right).items() if verdict.seconds}
    milliseconds = {name: 1e3 * (verdict.seconds or 0.0) for name, verdict in timed.items()}
    changing = [name for name, verdict in timed.items() if not verdict.same_bits]
    return Times(f"{operator.name}, {words}", milliseconds, changing)


def _heads() -> list[KernelShape]:
    return [replace(shape, machine=backend.device()) for shape in _HEADS]


def _attention_calls() -> list[AttentionCall]:
    """Return a call of each class, long enough for every implementation."""
    return [_attention_call(shape) for shape in _HEADS]


def _attention_call(shape: KernelShape) -> AttentionCall:
    dtype, length = getattr(mx, shape.dtype), 1024
    q = mx.zeros((1, 2, length, shape.size), dtype)
    k = mx.zeros((1, 1 if shape.grouped else 2, length, shape.size), dtype)
    v = mx.zeros((*k.shape[:3], shape.value_size), dtype)
    segments = mx.zeros((1, length), mx.int32) if shape.segmented else None
    window, sinks = 4 if shape.windowed else None, mx.zeros((2,)) if shape.with_sinks else None
    return AttentionCall(q, k, v, shape.causal, segments, window, sinks, None, shape.size**-0.5)


def _delta_calls() -> list[Call]:
    """Return a call of each class, with one token."""
    return [_delta_call(shape) for shape in _MODELS]


def _delta_call(shape: ShapeClass) -> Call:
    dtype = getattr(mx, shape.dtype)
    q = mx.zeros((1, 1, shape.key_heads, shape.key_size), dtype)
    v = mx.zeros((1, 1, shape.value_heads, shape.value_size), dtype)
    gates = (1, 1, shape.value_heads, shape.key_size) if shape.per_channel else (1, 1, shape.value_heads)
    return Call(q, q, v, mx.zeros(gates), shape.masked, shape.segmented)


def _chunk(shape: ShapeClass) -> Finding:
    verdict = judged(delta_case.trial_case(shape, by_recurrence=True), gated_delta_chunk, "chunk")
    finding = _finding(verdict, "right" if verdict.passed else "wrong")
    if not verdict.passed and backend.device() != "cpu" and max(verdict.errors.values(), default=math.inf) <= TF32:
        finding.status = "TF32"
        finding.detail += "; MLX multiplies fp32 in TF32 on this GPU unless MLX_ENABLE_TF32=0 is set"
    return finding


def _fast(examined: _Examined, name: str, call: Any, names: Sequence[str]) -> Finding:
    """Try an implementation. One that fails is not used, unless it is forced, and then training does not start."""
    candidate = examined.candidates()[name](call)
    if isinstance(candidate, str):
        return Finding(name, str(examined.shape_of(call)), "not covered", candidate)
    verdict = candidates.verdict_anew(examined.operator(), name, candidate)
    return _finding(verdict, "right" if verdict.passed else "wrong" if tuple(names) == (name,) else "refused")


def _finding(verdict: Verdict, status: str) -> Finding:
    worst = verdict.worst if verdict.errors else None
    bound = verdict.bound if worst is None else verdict.bound_of(worst)
    return Finding(verdict.implementation, verdict.shape, status, str(verdict), verdict.errors, worst, bound)


@dataclass(frozen=True)
class _Examined:
    """An operator with its implementations, and the class of a call of it."""

    operator: Callable[[], Operator]
    candidates: Callable[[], Mapping[str, Callable[[Any], Candidate | str]]]
    shape_of: Callable[[Any], ShapeClass | KernelShape]


_GATED_DELTA = _Examined(lambda: choice.OPERATOR, lambda: choice.CANDIDATES, Call.shape_class)
_ATTENTION = _Examined(
    lambda: attention.choice.OPERATOR,
    lambda: attention.choice.CANDIDATES,
    lambda call: call.shape_class(backend.device()),
)
