"""Chooses the implementation of attention that serves a call, as candidates.py says; the last one is `blocked`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ...machine import backend, environment
from .. import candidates
from ..candidates import Candidate
from . import fused_op, kernel_trial
from .blocked import attention_blocked
from .fused import FusedOptions
from .kernel_trial import Implementation, KernelShape
from .naive import attention_naive
from .native import attention_native

# Up to this number of scores, MLX's own attention is as fast on a CPU or faster (docs/log.md), and its matrix of scores
# takes no more memory than a block of `blocked` with all its intermediate results.
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


def _fused(call: AttentionCall) -> Candidate | str:
    reason = fused_op.unsupported(call.q, call.k, call.v, call.mask)
    if reason:
        return reason
    options = FusedOptions(call.scale, call.causal, call.window, call.segments is not None, call.sinks is not None)
    machine = fused_op.machine_for(options, call.q, call.v)
    function = partial(fused_op.attention_fused, machine=machine)
    return Candidate(function, call.shape_class(machine), function)


def _native(call: AttentionCall) -> Candidate | str:
    """MLX's own attention, for calls with few scores, where another implementation would save no memory."""
    batch, heads, queries, _ = call.q.shape
    if any(x.dtype != mx.float32 for x in (call.q, call.k, call.v)):
        return "MLX is slow in half precision on a CPU"
    if call.mask is not None or queries > call.k.shape[2]:
        return "a query may see no key, and MLX's result for it is not 0"
    if batch * heads * queries * call.k.shape[2] > FEW_SCORES:
        return "MLX would hold many scores"
    return Candidate(attention_native)


# By name: a call -> the candidate for it, or why the implementation does not support the call.
CANDIDATES: dict[str, Callable[[AttentionCall], Candidate | str]] = {
    "naive": lambda call: Candidate(attention_naive),
    "blocked": lambda call: Candidate(attention_blocked),
    "fused": _fused,
    "native": _native,
}


def choose(call: AttentionCall) -> tuple[str, Implementation]:
    """Return the name and the function of the implementation that serves `call`. candidates.choose says how.

    Raises:
        UserError: DELTATUNE_ATTENTION forces an implementation that does not support the call or fails its check.
    """
    order = backend.attention_candidates()

    def candidate_of(name: str) -> Candidate | str:
        # If MLX's own attention is forced, it serves every call.
        return Candidate(attention_native) if order[0] == ("native",) else CANDIDATES[name](call)

    return candidates.choose(
        "attention",
        environment.ATTENTION,
        order,
        candidate_of,
        lambda _, function, shape: kernel_trial.of(function, shape),
    )
