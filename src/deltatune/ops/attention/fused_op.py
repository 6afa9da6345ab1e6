"""attention by the fused kernels: one differentiable function around the launches of fused.py or hopper.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import log

import mlx.core as mx

from ...machine import backend, nvidia
from ..functional import not_differentiated_again, refuse_second_derivative, with_gradient, without_vmap
from . import fused, hopper, long_launches
from .blocked import NO_SECOND_DERIVATIVE, NO_VMAP
from .fused import FusedOptions

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
) -> mx.array:
    """Run the fused kernels of a machine, one of MACHINES, by default that of MLX's device and the call.

    Other arguments, the result and errors are those of `attention`; ValueError, with the message of `unsupported`, for
    a call that the kernels do not support.
    """
    reason = unsupported(q, k, v, mask)
    if reason:
        raise ValueError(f"attention: the fused kernels do not support this call: {reason}.")
    options = FusedOptions(float(scale), causal, window, segments is not None, sinks is not None)
    extra = [] if sinks is None else [sinks.astype(mx.float32)]
    spans = [] if segments is None else list(segment_spans(segments))
    forward = _forward_by(options, machine or machine_for(options, q, v))
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
def _forward_by(options: FusedOptions, machine: str) -> _Function:
    """Return f(q, k, v, sinks?, starts?, ends?) -> (y, sums)."""
    names = ("q", "k", "v", *["sinks"] * options.with_sinks, *["starts", "ends"] * options.segmented)

    def run_forward(*arrays: mx.array) -> _Arrays:
        x = dict(zip(names, arrays, strict=True))
        if machine == "hopper":
            return tuple(hopper.forward(options, x))
        return tuple(long_launches.run(fused.FORWARD, options, x, machine))

    def run_backward(*arrays: mx.array) -> _Arrays:
        """Return the gradients of q, k, v and the sinks, from the inputs, dy, y and the sums."""
        x = dict(zip((*names, "dy", "y", "sums"), arrays, strict=True))
        x["dy"] = x["dy"].astype(x["y"].dtype)
        if machine == "hopper":
            *gradients, delta = hopper.backward(options, x)
        else:
            x["delta"] = delta = fused.delta(x["y"], x["dy"])
            divided = machine == "metal" and fused.alone(x)
            of_keys = (fused.KEYS_ALONE, fused.VALUES_ALONE) if divided else (fused.KEYS,)
            kernels = (fused.QUERIES, *of_keys)
            gradients = [array for kernel in kernels for array in long_launches.run(kernel, options, x, machine)]
        return *gradients, *([sink_gradient(x["sinks"], x["sums"], delta)] if options.with_sinks else [])

    def vjp(primals: _Arrays, cotangents: _Arrays, outputs: _Arrays) -> _Arrays:
        backward = not_differentiated_again(run_backward, refuse_second_derivative(NO_SECOND_DERIVATIVE))
        gradients = backward(*primals, cotangents[0], *outputs)
        return *gradients, *map(mx.zeros_like, primals[len(gradients) :])

    return with_gradient(run_forward, vjp)


def sink_gradient(sinks: mx.array, sums: mx.array, delta: mx.array) -> mx.array:
    """Return the gradient of the sinks [Hq]: their share of each row's weights, exp(sink) / sum, adds nothing to y."""
    # Padding rows have an infinite sum, and rows that see only the sink a delta of 0, so neither contributes.
    share = mx.exp(sinks[:, None] - sums * _LN2)
    return -(share * delta).sum(axis=(0, 2))
