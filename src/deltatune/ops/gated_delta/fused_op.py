"""gated_delta by the fused kernels: one custom function around the launches of fused.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import mlx.core as mx

from ...machine import backend
from ..kernels.launch import Launch
from . import fused, fused_channel
from .fused import KernelInputs, Tiling

Execute = Callable[[Launch], list[mx.array]]
Cut = Callable[..., Tiling | None]
Shape = tuple[int, int, int, int, int, int]
_Arrays = tuple[mx.array, ...]
_Function = Callable[..., _Arrays]

# q, k, v, log_g, beta; then the initial state, the mask and the segments, where they are given.
_FLOATS = 5
# Smaller head sizes waste most of a 16 x 16 tile.
_LEAST = 4


def gated_delta_fused(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    *,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    segments: mx.array | None = None,
    cut: Cut | None = None,
    execute: Execute = Launch.run,
) -> tuple[mx.array, mx.array]:
    """The fused kernels, two launches forward and two backward; arguments and result as `gated_delta`.

    cut: makes the plan of a call, as plan_on does; by default that of MLX's device.
    execute: runs a launch; by default on MLX's device.

    Raises ValueError for a call that the kernels do not cover (`uncovered` says why), and when mx.vmap maps it;
    NotImplementedError when a second derivative is taken.
    """
    cut = cut or cut_on(backend.device())
    options = {"masked": mask is not None, "segmented": segments is not None, "per_channel": log_g.ndim == 4}
    reason = uncovered(q, k, v, cut(shape_of(k, v), q.dtype, **options))
    if reason:
        raise ValueError(f"gated_delta: the fused kernels do not cover this call: {reason}.")
    extra = [mask] if mask is not None else []
    extra += [segments.astype(mx.int32)] if segments is not None else []
    forward = _forward_by(cut, execute, stateful=initial_state is not None, **options)
    floats = [x.astype(mx.float32) for x in (log_g, beta, initial_state) if x is not None]
    arrays = _unmapped()(q, k, v, *floats, *map(mx.stop_gradient, extra))
    y, state, *_ = forward(*arrays)
    return y, state


@cache
def _unmapped() -> _Function:
    """The arrays as they are, and no vmap over them: its rule is asked before MLX comes to the kernels behind it."""

    def refuse(*_: object) -> None:
        raise ValueError(
            "gated_delta: mx.vmap cannot map the fused kernels. Expected every array with its batch axis B first; fold "
            "the mapped axis into B, or set DELTATUNE_GATED_DELTA=chunk, which can be mapped."
        )

    same = mx.custom_function(lambda *arrays: arrays)
    same.vjp(lambda primals, cotangents, outputs: cotangents)
    same.vmap(refuse)
    return cast(_Function, same)


@cache
def cut_on(machine: str) -> Cut:
    """plan_on for `machine`, metal or cuda; the same function at every call."""
    return partial(plan_on, machine)


def plan_on(machine: str, shape: Shape, dtype: mx.Dtype, *, masked: bool, segmented: bool, per_channel: bool):
    """How `machine` cuts a call of shape (B, T, Hk, Hv, Dk, Dv); None where its memory cannot hold it."""
    kernels = fused_channel if per_channel else fused
    return kernels.plan(machine, shape, dtype, masked=masked, segmented=segmented)


def shape_of(k: mx.array, v: mx.array) -> Shape:
    """(B, T, Hk, Hv, Dk, Dv), as plan_on takes it."""
    return k.shape[0], k.shape[1], k.shape[2], v.shape[2], k.shape[3], v.shape[3]


def uncovered(q: mx.array, k: mx.array, v: mx.array, plan: Tiling | None) -> str | None:
    """Why the kernels cannot serve a call that has the contract's shapes; None where they can."""
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, and the kernels want one dtype"
    if min(k.shape[3], v.shape[3]) < _LEAST:
        return f"heads of {k.shape[3]} x {v.shape[3]} are smaller than {_LEAST}"
    if plan is None:
        return f"heads of {k.shape[3]} x {v.shape[3]} in {q.dtype} do not fit in a block's memory"
    return None


@cache
def _forward_by(
    cut: Cut, execute: Execute, stateful: bool, masked: bool, segmented: bool, per_channel: bool
) -> _Function:
    """f(q, k, v, log_g, beta, state?, mask?, segments?) -> (y, final state, and what the backward pass reads)."""
    kernels: Any = fused_channel if per_channel else fused
    floats = _FLOATS + stateful
    inputs = floats + masked + segmented
    options = {"masked": masked, "segmented": segmented, "per_channel": per_channel}

    def planned(arrays: Sequence[mx.array]) -> tuple[Tiling, KernelInputs]:
        q, k, v, log_g, beta = arrays[:_FLOATS]
        plan = cut(shape_of(k, v), q.dtype, **options)
        assert plan is not None, "covered: checked before"
        initial = arrays[_FLOATS] if stateful else fused.no_state()
        mask = arrays[floats] if masked else None
        segments = arrays[inputs - 1] if segmented else None
        return plan, KernelInputs(q, k, v, log_g, beta, initial, mask, segments)

    def run_forward(*arrays: mx.array) -> _Arrays:
        plan, x = planned(arrays)
        prepared = execute(kernels.prepare(plan, x))
        y, states, u, last = execute(kernels.scan(plan, x, *prepared))
        return y, last, states, u, *prepared

    def run_backward(*arrays: mx.array) -> _Arrays:
        """Gradients of the floats, from the inputs, dy, the final state's gradient, and what the forward pass left."""
        plan, x = planned(arrays)
        dy, d_last, states, u, *prepared = arrays[inputs:]
        dy, d_last, factors = dy.astype(plan.dtype), d_last.astype(mx.float32), prepared[2]
        d_states, d_right, dv, d_initial = execute(kernels.reverse(plan, x, *prepared, dy, d_last))
        dq, dk, d_log_g, d_beta = execute(kernels.gradients(plan, x, factors, states, d_states, u, d_right, dy))
        return (dq, dk, dv, d_log_g, d_beta, d_initial)[:floats]

    # No rule for vmap here: MLX would map the graph inside as well, and its custom kernels have none (_unmapped).
    forward, backward = mx.custom_function(run_forward), mx.custom_function(run_backward)
    call_forward, call_backward = cast(_Function, forward), cast(_Function, backward)

    def vjp(primals: _Arrays, cotangents: _Arrays, outputs: _Arrays) -> _Arrays:
        gradients = call_backward(*primals, *cotangents[:2], *outputs[2:])
        return *gradients, *map(mx.zeros_like, primals[floats:])

    def refuse(*_: object) -> None:
        raise NotImplementedError(
            "gated_delta has no second derivative: its backward pass is written by hand. "
            "Force the recurrence, DELTATUNE_GATED_DELTA=naive, where one is needed."
        )

    forward.vjp(vjp)
    backward.vjp(refuse)
    return call_forward
