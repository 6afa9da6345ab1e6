"""Chooses the implementation of attention that serves a call, as candidates.py says; the last one is `blocked`."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx

from ...machine import backend
from .. import IMPLEMENTATIONS
from ..operator.operator import Candidate, Operator
from ..tracing import trace
from . import fused_op, trial_case
from .blocked import attention_blocked
from .fused import FusedOptions
from .naive import attention_naive
from .native import attention_native, is_linear
from .trial_case import AttentionCall

# Up to this number of scores, MLX's own attention is as fast on a CPU or faster (docs/decisions/attention.md),
# and its matrix of scores takes no more memory than a block of `blocked` with all its intermediate results.
FEW_SCORES = 1 << 21


def _fused(call: AttentionCall) -> Candidate | str:
    reason = fused_op.unsupported(call.q, call.k, call.v, call.mask)
    if reason:
        return reason
    options = FusedOptions(call.scale, call.causal, call.window, call.segments is not None, call.sinks is not None)
    machine = fused_op.machine_for(options, call.q, call.v)
    function = partial(fused_op.attention_fused, machine=machine)
    return Candidate(function, call.shape_class(machine), function)


def _native(call: AttentionCall) -> Candidate | str:
    """MLX's own attention, where it holds few scores: for few pairs of positions, or where it needs no matrix of them.

    MLX's result for a query that sees no key is not 0, so calls with such queries are not its own. If it is forced, it
    serves every call.
    """
    if OPERATOR.forced() == "native":
        return Candidate(attention_native)
    if call.mask is not None or call.q.shape[2] > call.k.shape[2]:
        return "a query may see no key, and MLX's result for it is not 0"
    if backend.device() == "metal":
        return _native_on_metal(call)
    batch, heads, queries, _ = call.q.shape
    if any(x.dtype != mx.float32 for x in (call.q, call.k, call.v)):
        return "MLX is slow in half precision on a CPU"
    if batch * heads * queries * call.k.shape[2] > FEW_SCORES:
        return "MLX would hold many scores"
    return Candidate(attention_native)


def _native_on_metal(call: AttentionCall) -> Candidate | str:
    windowed = call.window is not None and call.window < call.k.shape[2]
    if windowed or call.segments is not None or call.sinks is not None:
        return "with a window, segments or sinks MLX would hold all scores"
    if not call.q.dtype == call.k.dtype == call.v.dtype:
        return f"q, k and v are {call.q.dtype}, {call.k.dtype} and {call.v.dtype}"
    shapes = (tuple(x.shape) for x in (call.q, call.k, call.v))
    if not is_linear(*shapes, call.q.dtype, call.causal):
        return "MLX would hold all scores"
    return Candidate(_without_window, call.shape_class("metal"), _without_window)


def _without_window(*arrays: mx.array, window: int | None = None, **options: Any) -> mx.array:
    """MLX's own attention for a call with a window that hides nothing, although a patch has ours in mx.fast, too."""
    with trace.having(to_upstream=True):
        return attention_native(*arrays, **options)


def _blocked(call: AttentionCall) -> Candidate:
    return Candidate(attention_blocked, call.shape_class(backend.device()), attention_blocked, trusted=True)


OPERATOR = Operator(
    name="attention",
    implementations=IMPLEMENTATIONS["attention"],
    orders={"cpu": ("native", "blocked"), "cuda": ("fused", "blocked"), "metal": ("fused", "native", "blocked")},
    candidates={
        "naive": lambda call: Candidate(attention_naive),
        "blocked": _blocked,
        "fused": _fused,
        "native": _native,
    },
    case_of=trial_case.trial_case,
    timed_case_of=trial_case.timed_case,
    examples=trial_case.calls,
    compare_last=trial_case.compare_blocked,
    workloads=trial_case.workloads,
)
