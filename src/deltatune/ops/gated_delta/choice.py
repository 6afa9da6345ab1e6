"""Chooses the implementation of gated_delta that serves a call, as candidates.py says; the last one is `chunk`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

from ...machine import backend
from .. import IMPLEMENTATIONS
from ..operator.operator import Candidate, Operator
from . import fused_op, native, trial_case, workloads
from .call import Call
from .chunk import gated_delta_chunk
from .naive import gated_delta_naive
from .tiling import Tiling
from .trial_case import Implementation


def _fused(call: Call) -> Candidate | str:
    tiling_of_call = fused_op.tiling_on(backend.device())
    options = {"masked": call.masked, "segmented": call.segmented, "per_channel": call.log_g.ndim == 4}
    tiling = tiling_of_call(fused_op.shape_of(call.k, call.v), call.q.dtype, **options)
    reason = fused_op.unsupported(call.q, call.k, call.v, tiling)
    if reason or tiling is None:
        return reason or "it has no tiling"
    name, checked = _checked(tiling)
    return Candidate(
        fused_op.gated_delta_fused, call.shape_class(name, fused_op.dtype_of_beta(tiling, call.beta_dtype)), checked
    )


@lru_cache(maxsize=256)
def _checked(tiling: Tiling) -> tuple[str, Implementation]:
    """Return the text of a call's own tiling on a small batch, and the function that runs the kernels with it.

    Kernels compiled for the check serve the training too.
    """
    small = replace(tiling, batch=trial_case.BATCH, length=trial_case.LENGTH)

    def tiling_of_check(*_: object, **__: object) -> Tiling:
        return small

    return repr(small), partial(fused_op.gated_delta_fused, tiling_of_call=tiling_of_check)


def _native(call: Call) -> Candidate | str:
    reason = native.unsupported(call.k, call.v, call.log_g)
    if reason:
        return reason
    # The gradient of MLX's kernels on Metal (GatedDeltaUpdateVJP) sums by atomic operations.
    function, atomics = native.gated_delta_native, not native.loops()
    return Candidate(function, call.shape_class(), function, atomics=atomics)


def _chunk(call: Call) -> Candidate:
    return Candidate(gated_delta_chunk, call.shape_class(), gated_delta_chunk, trusted=True)


OPERATOR = Operator(
    name="gated_delta",
    implementations=IMPLEMENTATIONS["gated_delta"],
    orders={"cpu": ("chunk",), "cuda": ("fused", "chunk"), "metal": ("fused", "native", "chunk")},
    candidates={
        "naive": lambda call: Candidate(gated_delta_naive),
        "chunk": _chunk,
        "fused": _fused,
        "native": _native,
    },
    case_of=trial_case.trial_case,
    timed_case_of=trial_case.trial_case,
    examples=workloads.calls,
    compare_last=workloads.compare_chunk,
    workloads=workloads.workloads,
)
