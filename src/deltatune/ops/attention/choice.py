"""Which implementation serves a call: the first of the device's that covers it and passes its trial here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ...errors import UserError
from ...machine import backend, environment
from ..gated_delta.choice import ImplementationWarning
from ..gated_delta.machine_trial import Verdict, machine
from . import fused_op, kernel_trial
from .blocked import attention_blocked
from .fused import FusedOptions
from .kernel_trial import Implementation, KernelShape
from .naive import attention_naive
from .native import attention_native

logger = logging.getLogger(__name__)

# Scores in fp32 that take no more memory on a CPU than a block of `blocked` does with all that belongs to it. Up to
# here MLX's own attention is as fast or faster (docs/log.md), and keeps little.
FEW_SCORES = 1 << 21


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a call, which decide who can serve it."""

    q: mx.array
    k: mx.array
    v: mx.array
    causal: bool
    segments: mx.array | None
    window: int | None
    sinks: mx.array | None
    mask: mx.array | None
    scale: float

    def shape_class(self, whose: str) -> KernelShape:
        dtype = str(self.q.dtype).removeprefix("mlx.core.")
        windowed = self.window is not None and self.window < self.k.shape[2]
        options = (self.causal, windowed, self.segments is not None, self.sinks is not None)
        grouped = self.q.shape[1] > self.k.shape[1]
        return KernelShape(whose, self.q.shape[3], self.v.shape[3], dtype, grouped, *options)


def _fused(call: AttentionCall) -> tuple[Implementation, KernelShape] | str:
    reason = fused_op.uncovered(call.q, call.k, call.v, call.mask)
    if reason:
        return reason
    kind = FusedOptions(call.scale, call.causal, call.window, call.segments is not None, call.sinks is not None)
    whose = fused_op.machine_for(kind, call.q, call.v)
    return partial(fused_op.attention_fused, machine=whose), call.shape_class(whose)


def _native(call: AttentionCall) -> tuple[Implementation, None] | str:
    """MLX's own attention where a call has few scores: there is nothing to save."""
    batch, heads, queries, _ = call.q.shape
    if any(x.dtype != mx.float32 for x in (call.q, call.k, call.v)):
        return "MLX is slow in half precision on a CPU"
    if call.mask is not None or queries > call.k.shape[2]:
        return "a query may see nothing, and MLX gives no zeros there"
    if batch * heads * queries * call.k.shape[2] > FEW_SCORES:
        return "MLX would hold many scores"
    return attention_native, None


CANDIDATES: dict[str, Callable[[AttentionCall], tuple[Implementation, KernelShape | None] | str]] = {
    "naive": lambda call: (attention_naive, None),
    "blocked": lambda call: (attention_blocked, None),
    "fused": _fused,
    "native": _native,
}
_said: set[str] = set()


def choose(call: AttentionCall) -> tuple[str, Implementation]:
    """The name and the function of the implementation that serves `call`.

    Warns (ImplementationWarning), once for each class of shapes, about one that fails its trial. Raises UserError
    where the environment forces one that does not cover the call, or that fails its trial.
    """
    names, why = backend.attention_candidates()
    forced = len(names) == 1
    passed_over = []
    for name in names:
        # MLX's own serves any call that it is forced to serve.
        candidate = (attention_native, None) if forced and name == "native" else CANDIDATES[name](call)
        if isinstance(candidate, str):
            if forced:
                raise UserError(f"{environment.ATTENTION}={name} cannot serve this call: {candidate}.")
            passed_over.append(f"{name} does not cover it: {candidate}")
            continue
        function, shape = candidate
        found = None if shape is None else kernel_trial.of(function, shape)
        if found is None or found.passed:
            _once(f"attention: {name} ({'; '.join([why, *passed_over])})")
            return name, function
        if forced:
            raise UserError(f"{environment.ATTENTION}={name}: {found}. Unset it to train with blocked.")
        _warn(found)
        passed_over.append(f"{name} fails its trial")
    raise AssertionError("blocked serves every call")


def _once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.info(message)


def _warn(failure: Verdict) -> None:
    message = (
        f"attention: {failure}. It is not used on this machine ({machine()['device']}): training goes on without it, "
        "right but slower."
    )
    if message not in _said:
        _said.add(message)
        warnings.warn(message, ImplementationWarning, stacklevel=4)
