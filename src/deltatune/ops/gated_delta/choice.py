"""Chooses the implementation of gated_delta that serves a call.

Each device has an order of preference (machine/backend.py). The first implementation in it that supports the call and
passes its check on this machine is used; `chunk`, which is last, supports every call.
"""

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
from .machine_trial import Implementation, ShapeClass, Verdict
from .naive import gated_delta_naive
from .tiling import Tiling

logger = logging.getLogger(__name__)


class ImplementationWarning(UserWarning):
    """Warns that a fast implementation is wrong on this machine and is not used; the message says by how much."""


@dataclass(frozen=True)
class Call:
    """The arguments of a call of `gated_delta` that decide which implementation can serve it."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    masked: bool
    segmented: bool

    def shape_class(self, tiling: str = "") -> ShapeClass:
        """Return the class of calls that share a verdict; `tiling` tells kernels of equal shapes apart."""
        heads = (self.k.shape[2], self.v.shape[2], self.k.shape[3], self.v.shape[3])
        dtype = str(self.v.dtype).removeprefix("mlx.core.")
        return ShapeClass(*heads, dtype, self.masked, self.segmented, self.log_g.ndim == 4, tiling)


@dataclass(frozen=True)
class Candidate:
    """An implementation that supports a call.

    Attributes:
        function: Serves the call.
        shape: The class of calls whose verdict decides about this one; None where no check is needed.
        checked: The function that the check calls, which runs the same kernels on a small batch.
    """

    function: Implementation
    shape: ShapeClass | None = None
    checked: Implementation | None = None


def _fused(call: Call) -> Candidate | str:
    tiling_of_call = fused_op.tiling_on(backend.device())
    options = {"masked": call.masked, "segmented": call.segmented, "per_channel": call.log_g.ndim == 4}
    tiling = tiling_of_call(fused_op.shape_of(call.k, call.v), call.q.dtype, **options)
    reason = fused_op.unsupported(call.q, call.k, call.v, tiling)
    if reason or tiling is None:
        return reason or "it has no tiling"
    # With the call's own tiling on a small batch, what is compiled for the check serves the training too.
    small = replace(tiling, batch=machine_trial.BATCH, length=machine_trial.LENGTH)

    def tiling_of_check(*_: object, **__: object) -> Tiling:
        return small

    checked = partial(fused_op.gated_delta_fused, tiling_of_call=tiling_of_check)
    return Candidate(fused_op.gated_delta_fused, call.shape_class(repr(small)), checked)


def _native(call: Call) -> Candidate | str:
    reason = native.unsupported(call.k, call.v, call.log_g)
    return reason or Candidate(native.gated_delta_native, call.shape_class(), native.gated_delta_native)


# By name: a call -> the candidate for it, or why the implementation does not support the call.
CANDIDATES: dict[str, Callable[[Call], Candidate | str]] = {
    "naive": lambda call: Candidate(gated_delta_naive),
    "chunk": lambda call: Candidate(gated_delta_chunk),
    "fused": _fused,
    "native": _native,
}
_announced: set[str] = set()


def choose(call: Call) -> tuple[str, Implementation]:
    """Return the name and the function of the implementation that serves `call`.

    It warns (ImplementationWarning) about an implementation that fails its check, once per class of shapes.

    Raises:
        UserError: DELTATUNE_GATED_DELTA forces an implementation that does not support the call or fails its check.
    """
    names, why = backend.gated_delta_candidates()
    forced = len(names) == 1
    passed_over = []
    for name in names:
        candidate = CANDIDATES[name](call)
        if isinstance(candidate, str):
            if forced:
                raise UserError(f"{environment.GATED_DELTA}={name} cannot serve this call: {candidate}.")
            passed_over.append(f"{name} does not support this call: {candidate}")
            continue
        failure = _failure(name, candidate)
        if failure is None:
            details = "; ".join([why, *passed_over])
            _log_once(f"gated_delta: {name} ({details})")
            return name, candidate.function
        if forced:
            raise UserError(f"{environment.GATED_DELTA}={name}: {failure}. Unset it to train with chunk.")
        _warn(failure)
        passed_over.append(f"{name} fails its check")
    raise AssertionError("chunk supports every call")


def _failure(name: str, candidate: Candidate) -> Verdict | None:
    """Return the verdict on a candidate that fails its check, or None where it passes or needs no check."""
    if candidate.shape is None or candidate.checked is None:
        return None
    outcome = machine_trial.of(name, candidate.checked, candidate.shape)
    return None if outcome.passed else outcome


def _log_once(message: str) -> None:
    if message not in _announced:
        _announced.add(message)
        logger.info(message)


def _warn(failure: Verdict) -> None:
    message = (
        f"gated_delta: {failure}. It is not used on this machine ({machine_trial.machine()['device']}): training goes "
        "on without it, correctly but more slowly. `deltatune doctor` shows every error that was measured."
    )
    if message not in _announced:
        _announced.add(message)
        warnings.warn(message, ImplementationWarning, stacklevel=4)
