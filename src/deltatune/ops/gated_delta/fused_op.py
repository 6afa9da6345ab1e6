"""gated_delta by the fused kernels: one differentiable function around the launches of fused.py or fused_channel.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import mlx.core as mx

from ...machine import backend
from ..functional import not_differentiated_again, refuse_second_derivative, without_vmap
from ..kernels.launch import Execute, Launch
from . import fused, fused_channel, fused_hopper
from .fused import KernelInputs
from .fused_hopper import HopperTiling, choose_hopper_tiling
from .tiling import ChannelTiling, Shape, Tiling, choose_channel_tiling, choose_tiling
from .transforms import NO_SECOND_DERIVATIVE

# (shape, dtype, masked=, segmented=, per_channel=) -> the tiling of a call, None where no kernel supports it.
TilingOfCall = Callable[..., Tiling | None]
_Arrays = tuple[mx.array, ...]
_Function = Callable[..., _Arrays]

_NO_VMAP = (
    "gated_delta: mx.vmap cannot map the fused kernels. Expected every array with its batch axis B first; fold "
    "the mapped axis into B, or set DELTATUNE_GATED_DELTA=chunk, which can be mapped."
)
# q, k, v, log_g, beta; then the initial state, the mask and the segments, where they are given.
_FLOATS = 5
# Smaller head sizes waste most of a 16 x 16 tile.
_SMALLEST_HEAD = 4


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
    tiling_of_call: TilingOfCall | None = None,
    execute: Execute = Launch.run,
) -> tuple[mx.array, mx.array]:
    """Run the fused kernels: two launches forward and two backward. Arguments and results are those of `gated_delta`.

    Args:
        tiling_of_call: Chooses how a call is divided, as `tiling_on` does for a machine; by default MLX's device.
        execute: Runs a launch. The default runs it on MLX's device.

    Raises:
        ValueError: The kernels do not support the call (the message is that of `unsupported`), or mx.vmap maps it.
        NotImplementedError: A second derivative is taken.
    """
    tiling_of_call = tiling_of_call or tiling_on(backend.device())
    options = {"masked": mask is not None, "segmented": segments is not None, "per_channel": log_g.ndim == 4}
    reason = unsupported(q, k, v, tiling_of_call(shape_of(k, v), q.dtype, **options))
    if reason:
        raise ValueError(f"gated_delta: the fused kernels do not support this call: {reason}.")
    constants = [mask] if mask is not None else []
    constants += [segments.astype(mx.int32)] if segments is not None else []
    forward = _differentiable(tiling_of_call, execute, stateful=initial_state is not None, **options)
    floats = [x.astype(mx.float32) for x in (log_g, beta, initial_state) if x is not None]
    arrays = without_vmap(_NO_VMAP)(q, k, v, *floats, *map(mx.stop_gradient, constants))
    y, state, *_ = forward(*arrays)
    return y, state


@cache
def tiling_on(machine: str) -> TilingOfCall:
    """Return the function that chooses tilings for `machine`, `metal` or `cuda`: the same object at every call."""
    return partial(tiling_of, machine)


def tiling_of(
    machine: str, shape: Shape, dtype: mx.Dtype, *, masked: bool, segmented: bool, per_channel: bool
) -> Tiling | None:
    """Return how `machine` divides a call of shape (B, T, Hk, Hv, Dk, Dv); None where its memory cannot hold it."""
    options = {"masked": masked, "segmented": segmented}
    if per_channel:
        return choose_channel_tiling(machine, shape, dtype, **options)
    on_hopper = choose_hopper_tiling(shape, dtype, **options) if machine == "cuda" else None
    return on_hopper or choose_tiling(machine, shape, dtype, **options)


def _kernels_of(tiling: Tiling) -> Any:
    """Return the module with the launches that `tiling` is for."""
    kinds = {ChannelTiling: fused_channel, HopperTiling: fused_hopper}
    return kinds.get(type(tiling), fused)


def shape_of(k: mx.array, v: mx.array) -> Shape:
    """Return (B, T, Hk, Hv, Dk, Dv)."""
    return k.shape[0], k.shape[1], k.shape[2], v.shape[2], k.shape[3], v.shape[3]


def unsupported(q: mx.array, k: mx.array, v: mx.array, tiling: Tiling | None) -> str | None:
    """Return why the kernels cannot serve a call whose tiling is `tiling`, or None where they can."""
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, and the kernels want one dtype"
    if min(k.shape[3], v.shape[3]) < _SMALLEST_HEAD:
        return f"heads of {k.shape[3]} x {v.shape[3]} are smaller than {_SMALLEST_HEAD}"
    if tiling is None:
        return f"heads of {k.shape[3]} x {v.shape[3]} in {q.dtype} do not fit in a block's memory"
    return None


@cache
def _differentiable(
    tiling_of_call: TilingOfCall, execute: Execute, stateful: bool, masked: bool, segmented: bool, per_channel: bool
) -> _Function:
    """Return f(q, k, v, log_g, beta, state?, mask?, segments?) -> (y, final state, what the backward pass reads)."""
    floats = _FLOATS + stateful
    inputs = floats + masked + segmented
    options = {"masked": masked, "segmented": segmented, "per_channel": per_channel}

    def kernel_inputs(arrays: Sequence[mx.array]) -> tuple[Tiling, KernelInputs]:
        q, k, v, log_g, beta = arrays[:_FLOATS]
        tiling = tiling_of_call(shape_of(k, v), q.dtype, **options)
        assert tiling is not None, "gated_delta_fused checks that the call is supported"
        initial = arrays[_FLOATS] if stateful else fused.no_initial_state()
        mask = arrays[floats] if masked else None
        segments = arrays[inputs - 1] if segmented else None
        return tiling, KernelInputs(q, k, v, log_g, beta, initial, mask, segments)

    def run_forward(*arrays: mx.array) -> _Arrays:
        tiling, x = kernel_inputs(arrays)
        kernels = _kernels_of(tiling)
        prepared = execute(kernels.prepare(tiling, x))
        y, states, u, last = execute(kernels.scan(tiling, x, dict(zip(kernels.PREPARED, prepared, strict=True))))
        return y, last, states, u, *prepared

    def run_backward(*arrays: mx.array) -> _Arrays:
        """Gradients of the floats, from the inputs, dy, the final state's gradient, and what the forward pass saved."""
        tiling, x = kernel_inputs(arrays)
        kernels = _kernels_of(tiling)
        dy, d_last, states, u, *saved = arrays[inputs:]
        dy, d_last = dy.astype(tiling.dtype), d_last.astype(mx.float32)
        prepared = dict(zip(kernels.PREPARED, saved, strict=True))
        d_states, d_right, dv, d_initial = execute(kernels.reverse(tiling, x, prepared, dy, d_last))
        scanned = {"factors": prepared["factors"], "states": states, "d_states": d_states, "u": u}
        scanned |= {"d_right": d_right, "dy": dy}
        dq, dk, d_log_g, d_beta = execute(kernels.gradients(tiling, x, scanned))
        return (dq, dk, dv, d_log_g, d_beta, d_initial)[:floats]

    # These have no vmap rule: MLX would map the graph inside them too, whose custom kernels have none (without_vmap).
    forward = mx.custom_function(run_forward)

    def vjp(primals: _Arrays, cotangents: _Arrays, outputs: _Arrays) -> _Arrays:
        backward = not_differentiated_again(run_backward, refuse_second_derivative(NO_SECOND_DERIVATIVE))
        gradients = backward(*primals, *cotangents[:2], *outputs[2:])
        return *gradients, *map(mx.zeros_like, primals[floats:])

    forward.vjp(vjp)
    return cast(_Function, forward)
