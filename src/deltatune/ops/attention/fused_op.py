"""attention by the fused kernels: one differentiable function around the launches of fused.py or hopper.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import log
from typing import cast

import mlx.core as mx

from ...machine import backend, nvidia
from ..functional import not_differentiated_again, refuse_second_derivative, without_vmap
from ..kernels.launch import Execute, Launch
from . import fused, hopper, long_launches
from .blocked import NO_SECOND_DERIVATIVE, NO_VMAP
from .fused import FusedOptions, Operands

# The machines that have kernels: Apple's GPUs, NVIDIA's, and NVIDIA's Hopper, which also has kernels of its own.
MACHINES = ("metal", "cuda", "hopper")
_Arrays = tuple[mx.array, ...]
_Function = Callable[..., _Arrays]
_LN2 = log(2.0)


def attention_fused(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    causal: bool = True,
    segments: mx.array | None = None,
    window: int | None = None,
    sinks: mx.array | None = None,
    mask: mx.array | None = None,
    machine: str | None = None,
    execute: Execute = Launch.run,
) -> mx.array:
    """Run the fused kernels. Arguments and result are those of `attention`.

    Args:
        machine: The machine of the kernels that run, one of MACHINES. The default depends on MLX's device and the call.
        execute: Runs a launch. The default runs it on MLX's device.

    Raises:
        ValueError: The kernels do not support the call (the message is that of `unsupported`), or mx.vmap maps it.
        NotImplementedError: A second derivative is taken.
    """
    reason = unsupported(q, k, v, mask)
    if reason:
        raise ValueError(f"attention: the fused kernels do not support this call: {reason}.")
    options = FusedOptions(float(scale), causal, window, segments is not None, sinks is not None)
    extra = [] if sinks is None else [sinks.astype(mx.float32)]
    spans = [] if segments is None else list(segment_spans(segments))
    forward = _forward_by(options, machine or machine_for(options, q, v), execute)
    y, _ = forward(*without_vmap(NO_VMAP)(q, k, v, *extra, *map(mx.stop_gradient, spans)))
    return y


def machine_for(options: FusedOptions, q: mx.array, v: mx.array) -> str:
    """Return the machine of the kernels for a call on MLX's default device: `hopper` where its kernels support it."""
    here = backend.device()
    on_hopper = here == "cuda" and nvidia.generation() == nvidia.HOPPER
    return "hopper" if on_hopper and hopper.unsupported(options, q, v) is None else here


def unsupported(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> str | None:
    """Return why the kernels cannot serve a call with shapes that `attention` accepts, or None where they can."""
    if mask is not None:
        return "it has a mask in addition to causality, window and segments"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, and the kernels want one dtype"
    if max(q.shape[3], v.shape[3]) > fused.WIDEST:
        return f"heads of {q.shape[3]} x {v.shape[3]} are wider than {fused.WIDEST}"
    return None


def segment_spans(segments: mx.array) -> tuple[mx.array, mx.array]:
    """Return the position at which the segment of each position starts, and the one after its last, [B, T] int32."""
    length = segments.shape[1]
    place = mx.broadcast_to(mx.arange(length, dtype=mx.int32), segments.shape)
    changes = segments[:, 1:] != segments[:, :-1]
    start = mx.where(changes, place[:, 1:], 0)
    end = mx.where(changes, place[:, 1:], length)
    starts = mx.cummax(mx.concatenate([mx.zeros_like(place[:, :1]), start], axis=1), axis=1)
    ends = mx.cummin(mx.concatenate([end, mx.full_like(place[:, :1], length)], axis=1), axis=1, reverse=True)
    return starts.astype(mx.int32), ends.astype(mx.int32)


@lru_cache(maxsize=256)
def _forward_by(options: FusedOptions, machine: str, execute: Execute) -> _Function:
    """Return f(q, k, v, sinks?, starts?, ends?) -> (y, sums)."""

    def operands(arrays: Sequence[mx.array]) -> Operands:
        extra = list(arrays[3:])
        sinks = extra.pop(0) if options.with_sinks else None
        starts, ends = extra if options.segmented else (None, None)
        return Operands(arrays[0], arrays[1], arrays[2], sinks, starts, ends)

    inputs = 3 + options.with_sinks + 2 * options.segmented

    def run_forward(*arrays: mx.array) -> _Arrays:
        if machine == "hopper":
            return hopper.forward(options, operands(arrays), execute)
        if machine == "metal":
            y, sums = long_launches.forward(options, operands(arrays), machine, execute)
        else:
            y, sums = execute(fused.forward(options, operands(arrays), machine))
        return y, sums

    def run_backward(*arrays: mx.array) -> _Arrays:
        """Return the gradients of q, k, v and the sinks, from the inputs, dy, y and the sums."""
        x = operands(arrays[:inputs])
        dy, y, sums = arrays[inputs:]
        dy = dy.astype(y.dtype)
        if machine == "hopper":
            dq, dk, dv, delta = hopper.backward(options, x, dy, y, sums, execute)
        elif machine == "metal":
            (delta,) = execute(fused.delta(x, y, dy))
            (dq,) = long_launches.queries(options, x, (dy, sums, delta), machine, execute)
            dk, dv = long_launches.keys(options, x, (dy, sums, delta), machine, execute)
        else:
            (delta,) = execute(fused.delta(x, y, dy))
            (dq,) = execute(fused.queries(options, x, dy, sums, delta, machine))
            dk, dv = execute(fused.keys(options, x, dy, sums, delta, machine))
        return dq, dk, dv, *([sink_gradient(x.sinks, sums, delta)] if x.sinks is not None else [])

    forward = mx.custom_function(run_forward)

    def vjp(primals: _Arrays, cotangents: _Arrays, outputs: _Arrays) -> _Arrays:
        backward = not_differentiated_again(run_backward, refuse_second_derivative(NO_SECOND_DERIVATIVE))
        gradients = backward(*primals, cotangents[0], *outputs)
        return *gradients, *map(mx.zeros_like, primals[len(gradients) :])

    forward.vjp(vjp)
    return cast(_Function, forward)


def sink_gradient(sinks: mx.array, sums: mx.array, delta: mx.array) -> mx.array:
    """Return the gradient of the sinks [Hq]: their share of each row's weights, exp(sink) / sum, adds nothing to y."""
    # Padding rows have an infinite sum, and rows that see only the sink a delta of 0, so neither contributes.
    share = mx.exp(sinks[:, None] - sums * _LN2)
    return -(share * delta).sum(axis=(0, 2))
