"""Which implementation serves a call: the first of the device's that covers it and passes its check here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from ...errors import UserError
from ...machine import backend, environment
from . import fused_op, machine_trial, native
from .chunk import gated_delta_chunk
from .fused import Tiling
from .machine_trial import Implementation, ShapeClass, Verdict
from .naive import gated_delta_naive

logger = logging.getLogger(__name__)


class ImplementationWarning(UserWarning):
    """A fast implementation is wrong on this machine and is not used; the message says by how much."""


@dataclass(frozen=True)
class Call:
    """The arguments that decide who can serve a call."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    masked: bool
    segmented: bool

    def shape_class(self, cut: str = "") -> ShapeClass:
        heads = (self.k.shape[2], self.v.shape[2], self.k.shape[3], self.v.shape[3])
        dtype = str(self.v.dtype).removeprefix("mlx.core.")
        return ShapeClass(*heads, dtype, self.masked, self.segmented, self.log_g.ndim == 4, cut)


@dataclass(frozen=True)
class Candidate:
    """How an implementation is called; and, where it must pass a check, on which class and how it is called there."""

    function: Implementation
    shape: ShapeClass | None = None
    checked: Implementation | None = None


def _fused(call: Call) -> Candidate | str:
    cut = fused_op.cut_on(backend.device())
    options = {"masked": call.masked, "segmented": call.segmented, "per_channel": call.log_g.ndim == 4}
    plan = cut(fused_op.shape_of(call.k, call.v), call.q.dtype, **options)
    reason = fused_op.uncovered(call.q, call.k, call.v, plan)
    if reason or plan is None:
        return reason or "it has no plan"
    # The same kernels on a small batch: what was compiled for the check serves the training.
    small = replace(plan, batch=machine_trial.BATCH, length=machine_trial.LENGTH)

    def cut_small(*_: object, **__: object) -> Tiling:
        return small

    checked = partial(fused_op.gated_delta_fused, cut=cut_small)
    return Candidate(fused_op.gated_delta_fused, call.shape_class(repr(small)), checked)


def _native(call: Call) -> Candidate | str:
    reason = native.uncovered(call.k, call.v, call.log_g)
    return reason or Candidate(native.gated_delta_native, call.shape_class(), native.gated_delta_native)


CANDIDATES: dict[str, Callable[[Call], Candidate | str]] = {
    "naive": lambda call: Candidate(gated_delta_naive),
    "chunk": lambda call: Candidate(gated_delta_chunk),
    "fused": _fused,
    "native": _native,
}
_said: set[str] = set()


def choose(call: Call) -> tuple[str, Implementation]:
    """The name and the function of the implementation that serves `call`.

    Warns (ImplementationWarning), once for each class of shapes, about one that fails its check. Raises UserError
    where the environment forces one that does not cover the call, or that fails its check.
    """
    names, why = backend.gated_delta_candidates()
    forced = len(names) == 1
    passed_over = []
    for name in names:
        candidate = CANDIDATES[name](call)
        if isinstance(candidate, str):
            if forced:
                raise UserError(f"{environment.GATED_DELTA}={name} cannot serve this call: {candidate}.")
            passed_over.append(f"{name} does not cover it: {candidate}")
            continue
        failure = _failure(name, candidate)
        if failure is None:
            details = "; ".join([why, *passed_over])
            _once(f"gated_delta: {name} ({details})")
            return name, candidate.function
        if forced:
            raise UserError(f"{environment.GATED_DELTA}={name}: {failure}. Unset it to train with chunk.")
        _warn(failure)
        passed_over.append(f"{name} fails its check")
    raise AssertionError("chunk serves every call")


def _failure(name: str, candidate: Candidate) -> Verdict | None:
    if candidate.shape is None or candidate.checked is None:
        return None
    found = machine_trial.of(name, candidate.checked, candidate.shape)
    return None if found.passed else found


def _once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.info(message)


def _warn(failure: Verdict) -> None:
    message = (
        f"gated_delta: {failure}. It is not used on this machine ({machine_trial.machine()['device']}): training goes "
        "on without it, right but slower. `deltatune doctor` shows every error measured."
    )
    if message not in _said:
        _said.add(message)
        warnings.warn(message, ImplementationWarning, stacklevel=4)
