"""Chooses the implementation that serves a call, as candidates.py says; the last one is `chunk`.

The functions take calls of linear_attention as well, which the same implementations serve without beta.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import mlx.core as mx

from ...machine import backend
from .. import IMPLEMENTATIONS
from ..operator.operator import Candidate, Operator
from . import fused_op, native, trial_case
from .chunk import gated_delta_chunk
from .group import MatrixProducts
from .naive import gated_delta_naive
from .tiling import Shape, Tiling
from .trial_case import Call, Implementation


def _fused(call: Call) -> Candidate | str:
    """Return the fused kernels, or why they do not support a call."""
    tiling_of_call = fused_op.tiling_on(backend.device())
    options = {"masked": call.masked, "segmented": call.segmented, "per_channel": call.log_g.ndim == 4}
    options["erases"] = call.erases
    tiling = tiling_of_call(fused_op.shape_of(call.k, call.v), call.q.dtype, **options)
    reason = fused_op.unsupported(call.q, call.k, call.v, tiling)
    if reason or tiling is None:
        return reason or "it has no tiling"
    name, checked = _checked(tiling)
    shape = call.shape_class(name, fused_op.dtype_of_beta(tiling, call.beta_dtype or mx.float32))
    return Candidate(_of_call(call, fused_op.gated_delta_fused), shape, _of_call(call, checked))


def _of_call(call: Call, function: Implementation) -> Implementation:
    return function if call.erases else _without_beta(function)


@lru_cache(maxsize=256)
def _without_beta(function: Implementation) -> Implementation:
    """Return the function with no beta to pass on: the same object at every call."""
    return partial(function, beta=None)


@lru_cache(maxsize=256)
def _checked(tiling: Tiling) -> tuple[str, Implementation]:
    """Return the text of a call's own tiling on a small batch, and the function that runs the kernels with it.

    Kernels compiled for the check serve the training too.
    """
    small = replace(tiling, batch=trial_case.BATCH, length=trial_case.LENGTH)

    @lru_cache
    def tiling_of_check(shape: Shape, *_: object, **__: object) -> Tiling:
        return replace(small, batch=shape[0], length=shape[1])

    return repr(small), partial(fused_op.gated_delta_fused, tiling_of_call=tiling_of_check)


def _native(call: Call) -> Candidate | str:
    reason = native.unsupported(call.k, call.v, call.log_g)
    if reason:
        return reason
    # The gradient of MLX's kernels on Metal (GatedDeltaUpdateVJP) sums by atomic operations.
    function, atomics = native.gated_delta_native, not native.loops()
    return Candidate(function, call.shape_class(), function, atomics=atomics)


def _naive(call: Call) -> Candidate:
    """Return the recurrence by its definition."""
    return Candidate(_of_call(call, gated_delta_naive))


def _chunk(call: Call) -> Candidate:
    """Return the chunkwise form."""
    function = _of_call(call, gated_delta_chunk)
    return Candidate(function, call.shape_class(), function, trusted=True)


def _chunk_in_bf16(call: Call) -> Candidate | str:
    """Return the chunkwise form with products in bf16 and fp32 between them, or why it does not support a call."""
    dtypes = {call.q.dtype, call.k.dtype, call.v.dtype}
    if dtypes != {mx.bfloat16} or call.log_g.ndim == 4:
        return "it serves q, k and v in bf16, with one gate per head"
    function = _of_call(call, _chunk_bf16)
    return Candidate(function, call.shape_class(trial_case.IN_BF16), function)


_chunk_bf16 = partial(gated_delta_chunk, products=MatrixProducts(mx.bfloat16))
OPERATOR = Operator(
    name="gated_delta",
    implementations=IMPLEMENTATIONS["gated_delta"],
    orders={
        "cpu": ("chunk",),
        "cuda": ("fused", "chunk"),
        "metal": ("fused", "native", "chunk_bf16", "chunk"),
    },
    candidates={
        "naive": _naive,
        "chunk": _chunk,
        "chunk_bf16": _chunk_in_bf16,
        "fused": _fused,
        "native": _native,
    },
    case_of=trial_case.trial_case,
    timed_case_of=trial_case.timed_case,
    examples=trial_case.calls,
    compare_last=trial_case.compare_chunk,
    workloads=trial_case.workloads,
)
