"""Chooses the implementation of attention that serves a call, as candidates.py says; the last one is `blocked`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ...machine import backend, environment
from ..tracing import trace
from ..trial import candidates
from ..trial.candidates import Candidate, Operator
from . import fused_op, trial_case
from .blocked import attention_blocked
from .fused import FusedOptions
from .naive import attention_naive
from .native import attention_native, is_linear
from .trial_case import Implementation, KernelShape

# Up to this number of scores, MLX's own attention is as fast on a CPU or faster (docs/decisions/attention.md),
# and its matrix of scores takes no more memory than a block of `blocked` with all its intermediate results.
FEW_SCORES = 1 << 21


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a call of `attention`, which decide which implementation can serve it."""

    q: mx.array
    k: mx.array
    v: mx.array
    causal: bool
    segments: mx.array | None
    window: int | None
    sinks: mx.array | None
    mask: mx.array | None
    scale: float

    def shape_class(self, machine: str) -> KernelShape:
        """Return the class of calls that share a verdict on the kernels of `machine`."""
        dtype = str(self.q.dtype).removeprefix("mlx.core.")
        windowed = self.window is not None and self.window < self.k.shape[2]
        options = (self.causal, windowed, self.segments is not None, self.sinks is not None)
        grouped = self.q.shape[1] > self.k.shape[1]
        return KernelShape(machine, self.q.shape[3], self.v.shape[3], dtype, grouped, *options)

    @property
    def words(self) -> str:
        """The class of the call, in words that are the same on every machine."""
        fewer = self.q.shape[2] != self.k.shape[2]
        more = ["with a mask"] * (self.mask is not None) + ["fewer queries than keys"] * fewer
        return ", ".join([str(self.shape_class("")), *more])


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

    MLX's result for a query that sees no key is not 0, so calls with such queries are not its own.
    """
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
    return Candidate(_without_window, call.shape_class(backend.device()), _without_window)


def _without_window(*arrays: mx.array, window: int | None = None, **options: Any) -> mx.array:
    """MLX's own attention for a call whose window hides nothing, where a patch has deltatune's in mx.fast, too."""
    with trace.having(attending=True):
        return attention_native(*arrays, **options)


def _blocked(call: AttentionCall) -> Candidate:
    return Candidate(attention_blocked, call.shape_class(backend.device()), attention_blocked, trusted=True)


# By name: a call -> the candidate for it, or why the implementation does not support the call.
CANDIDATES: dict[str, Callable[[AttentionCall], Candidate | str]] = {
    "naive": lambda call: Candidate(attention_naive),
    "blocked": _blocked,
    "fused": _fused,
    "native": _native,
}


OPERATOR = Operator("attention", environment.ATTENTION, trial_case.trial_case, trial_case.timed_case)


def choose(call: AttentionCall) -> tuple[str, Implementation]:
    """Return the name and the function of the implementation that serves `call`. candidates.choose says how.

    Raises:
        UserError: DELTATUNE_ATTENTION forces an implementation that does not support the call or fails its check.
    """
    order = backend.attention_candidates()

    def candidate_of(name: str) -> Candidate | str:
        # If MLX's own attention is forced, it serves every call.
        return Candidate(attention_native) if order[0] == ("native",) else CANDIDATES[name](call)

    return candidates.choose(OPERATOR, order, call.words, candidate_of)
