"""Measures whether each implementation of gated_delta and attention that may be chosen here computes right results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from ..machine import backend
from ..ops import attention
from ..ops.attention import attention_blocked, kernel_trial
from ..ops.attention.choice import AttentionCall
from ..ops.attention.kernel_trial import KernelShape
from ..ops.gated_delta import choice, gated_delta_chunk, machine_trial
from ..ops.gated_delta.choice import Call
from ..ops.gated_delta.machine_trial import ShapeClass
from ..ops.gated_delta.tolerances import TF32
from ..ops.kernels.cubin import built_side_by_side
from ..ops.trial import candidates, timing
from ..ops.trial.candidates import Candidate, Operator
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
        for shape in _MODELS:
            candidate = choice.CANDIDATES["fused"](_call(shape))
            if not isinstance(candidate, str) and candidate.shape is not None and candidate.checked is not None:
                machine_trial.build(candidate.checked, candidate.shape)
        for heads in _HEADS:
            attends = attention.choice.CANDIDATES["fused"](_attention_call(replace(heads, machine=backend.device())))
            if not isinstance(attends, str):
                kernel_trial.build(attends.function, attends.shape)


def findings() -> list[Finding]:
    """Compare `chunk` with the recurrence, and each faster implementation with `chunk`."""
    names, _ = backend.gated_delta_candidates()
    found = of_chunk()
    for name in ("fused", "native"):
        if name in names or backend.device() != "cpu":
            found += [_fast(name, shape, forced=names == (name,)) for shape in _MODELS]
    return found


def of_chunk() -> list[Finding]:
    """Compare `chunk` with the recurrence."""
    return [_chunk(shape) for shape in _CHUNK]


def of_attention() -> list[Finding]:
    """Compare `blocked`, the fused kernels and, where it may serve, MLX's own attention with the definition."""
    names, _ = backend.attention_candidates()
    found = []
    shapes = [replace(shape, machine=backend.device()) for shape in _HEADS]
    for shape in shapes:
        verdict = kernel_trial.measure("blocked", attention_blocked, shape)
        found.append(_finding(verdict, "right" if verdict.passed else "wrong"))
    for name in ("fused", "native"):
        if backend.device() != "cpu" and (name == "fused" or name in names):
            found += [_fast_attention(name, shape, forced=names == (name,)) for shape in shapes]
    return found


def _fast_attention(name: str, shape: KernelShape, forced: bool) -> Finding:
    candidate = attention.choice.CANDIDATES[name](_attention_call(shape))
    if isinstance(candidate, str):
        return Finding(name, str(shape), "not covered", candidate)
    found = kernel_trial.again(name, candidate.function, candidate.shape)
    return _finding(found, "right" if found.passed else "wrong" if forced else "refused")


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
    of_attention = attention.choice
    shapes = [replace(shape, machine=backend.device()) for shape in _HEADS]
    found = [_times(choice.OPERATOR, choice.CANDIDATES, _call(shape), str(shape)) for shape in _MODELS]
    for shape in shapes:
        call = _attention_call(shape)
        found.append(_times(of_attention.OPERATOR, of_attention.CANDIDATES, call, call.words))
    return found


def _times(operator: Operator, by_name: Mapping[str, Callable[[Any], Candidate | str]], call: Any, words: str) -> Times:
    right = {}
    for name, candidate_of in by_name.items():
        candidate = candidate_of(call)
        if isinstance(candidate, str) or candidate.checked is None:
            continue
        if candidate.trusted or operator.verdict_of(name, candidate.checked, candidate.shape).passed:
            right[name] = candidate
    timed = {name: each for name, each in candidates.times(operator, right).items() if each.seconds is not None}
    milliseconds = {name: 1e3 * (each.seconds or 0.0) for name, each in timed.items()}
    return Times(
        f"{operator.name}, {words}", milliseconds, [name for name, each in timed.items() if not each.same_bits]
    )


def _attention_call(shape: KernelShape) -> AttentionCall:
    """A call whose arguments are of this class, long enough for every implementation."""
    dtype, length = getattr(mx, shape.dtype), 1024
    q = mx.zeros((1, 2, length, shape.size), dtype)
    k = mx.zeros((1, 1 if shape.grouped else 2, length, shape.size), dtype)
    v = mx.zeros((*k.shape[:3], shape.value_size), dtype)
    segments = mx.zeros((1, length), mx.int32) if shape.segmented else None
    window, sinks = 4 if shape.windowed else None, mx.zeros((2,)) if shape.with_sinks else None
    return AttentionCall(q, k, v, shape.causal, segments, window, sinks, None, shape.size**-0.5)


def _chunk(shape: ShapeClass) -> Finding:
    found = machine_trial.measure("chunk", gated_delta_chunk, shape, by_recurrence=True)
    finding = _finding(found, "right" if found.passed else "wrong")
    if not found.passed and backend.device() != "cpu" and max(found.errors.values(), default=math.inf) <= TF32:
        finding.status = "TF32"
        finding.detail += "; MLX multiplies fp32 in TF32 on this GPU unless MLX_ENABLE_TF32=0 is set"
    return finding


def _fast(name: str, shape: ShapeClass, forced: bool) -> Finding:
    candidate = choice.CANDIDATES[name](_call(shape))
    if isinstance(candidate, str):
        return Finding(name, str(shape), "not covered", candidate)
    return _checked(name, candidate, forced)


def _checked(name: str, candidate: Candidate, forced: bool) -> Finding:
    """Try the candidate. One that fails is not used, unless it is forced, and then training does not start."""
    if candidate.shape is None or candidate.checked is None:
        raise AssertionError(f"{name}: the candidate has neither a function nor a shape to check")
    found = machine_trial.again(name, candidate.checked, candidate.shape)
    return _finding(found, "right" if found.passed else "wrong" if forced else "refused")


def _finding(found: Verdict, status: str) -> Finding:
    worst = found.worst if found.errors else None
    bound = found.bound if worst is None else found.bound_of(worst)
    return Finding(found.implementation, found.shape, status, str(found), found.errors, worst, bound)


def _call(shape: ShapeClass) -> Call:
    """A call with one token, whose arguments are of this class."""
    dtype = getattr(mx, shape.dtype)
    q = mx.zeros((1, 1, shape.key_heads, shape.key_size), dtype)
    v = mx.zeros((1, 1, shape.value_heads, shape.value_size), dtype)
    gates = (1, 1, shape.value_heads, shape.key_size) if shape.per_channel else (1, 1, shape.value_heads)
    return Call(q, q, v, mx.zeros(gates), shape.masked, shape.segmented)
