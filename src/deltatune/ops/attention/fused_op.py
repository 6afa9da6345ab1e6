"""attention by the fused kernels: one differentiable function around the launches of fused.py or hopper.py.

macOS ends work that keeps an Apple GPU for about five seconds, so the launches of long rows are divided there. A part
computes some rows of queries with their visible keys, or some keys with the queries that may see them. It adds in the
order of the whole launch, so that the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import log

import mlx.core as mx
import numpy as np

from ...machine import backend, nvidia
from ..functional import not_differentiated_again, refuse_second_derivative, with_gradient, without_vmap
from ..kernels.launch import MOST_MULTIPLICATIONS, Arrays, Kernel
from . import fused, hopper
from .blocked import NO_SECOND_DERIVATIVE, NO_VMAP
from .fused import FORWARD, KEYS, KEYS_ALONE, QUERIES, TILE, VALUES_ALONE, FusedOptions

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
        return tuple(launched_in_parts(fused.FORWARD, options, x, machine))

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
            gradients = [array for kernel in kernels for array in launched_in_parts(kernel, options, x, machine)]
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


# The products of a pair of a query and a key, as multiples of the sizes of a key head and of a value head.
_PRODUCTS = {FORWARD: (1, 1), QUERIES: (2, 1), KEYS: (2, 2), KEYS_ALONE: (2, 1), VALUES_ALONE: (1, 1)}
_OF_QUERIES = ("q", "dy", "sums", "delta")

Part = tuple[int, int]


def launched_in_parts(kernel: Kernel, options: FusedOptions, x: Arrays, machine: str) -> list[mx.array]:
    """Run a kernel on one range of its rows after another, and return its outputs, those of fused.launch."""
    of_keys = kernel not in (FORWARD, QUERIES)
    parts = _parts(kernel, options, x, of_keys) if machine == "metal" else []
    if len(parts) <= 1:
        return fused.launch(kernel, options, x, machine)()
    of_part = _of_keys if of_keys else _of_rows
    outputs = []
    for first, last in parts:
        launch = fused.launch(kernel, options, of_part(options, x, first, last), machine)
        # A launch for some keys leaves the rest of its outputs unwritten.
        launch = replace(launch, blocks=(-(-(last - first) // TILE), *launch.blocks[1:]))
        outputs.append([output[:, :, : last - first] if of_keys else output for output in launch()])
    return [mx.concatenate(list(arrays), axis=2) for arrays in zip(*outputs, strict=True)]


def _of_keys(options: FusedOptions, x: Arrays, first: int, last: int) -> Arrays:
    """Return the arrays of a launch for the keys from `first` to before `last`, with the queries that may see them."""
    ahead = x["k"].shape[2] - x["q"].shape[2]
    # Queries before the first key of the part do not see it; those after the part see its keys.
    unseen = max(0, first - ahead) if options.causal else 0
    since = first if options.causal else 0
    part = {name: array[:, :, unseen:] if name in _OF_QUERIES else array for name, array in x.items()}
    part |= {name: x[name][:, :, since:] if options.causal else x[name][:, :, first:last] for name in ("k", "v")}
    bounds = [name for name in ("starts", "ends") if name in x]
    return part | {name: mx.maximum(x[name][:, since:] - since, 0) for name in bounds}


def _of_rows(options: FusedOptions, x: Arrays, first: int, last: int) -> Arrays:
    """Return the arrays of a launch for the queries from `first` to before `last`, with the keys that they may see."""
    seen = x["k"].shape[2] - x["q"].shape[2] + last if options.causal else x["k"].shape[2]
    part = {name: array[:, :, first:last] if name in _OF_QUERIES else array for name, array in x.items()}
    part |= {name: x[name][:, :, :seen] for name in ("k", "v")}
    if "starts" in x:
        part |= {"starts": x["starts"][:, :seen], "ends": mx.minimum(x["ends"][:, :seen], seen)}
    return part


def _parts(kernel: Kernel, options: FusedOptions, x: Arrays, of_keys: bool) -> list[Part]:
    batch, heads, count, size = x["q"].shape
    keys, products = x["k"].shape[2], _PRODUCTS[kernel]
    if options.segmented and not options.causal:
        # A query's segment is the one at its place from the end, which a part would change.
        return [(0, keys if of_keys else count)]
    pairs = MOST_MULTIPLICATIONS / (batch * heads * (products[0] * size + products[1] * x["v"].shape[3]))
    return divided(count, keys, options.causal, options.window_of(keys), pairs, of_keys)


@lru_cache(maxsize=256)
def divided(queries: int, keys: int, causal: bool, window: int, pairs: float, of_keys: bool = False) -> list[Part]:
    """Divide rows of queries (or keys) into parts of whole tiles with about `pairs` visible pairs or fewer each.

    The last query has the position of the last key; a window of 0 hides none. A single tile may have more pairs.
    """
    length = keys if of_keys else queries
    at, ahead = np.arange(0, length + TILE, TILE).clip(max=length), keys - queries
    if not causal:
        seen = at.astype(float) * (queries if of_keys else keys)
    elif of_keys:
        row = np.arange(length)
        visible_pairs = np.minimum(queries - np.maximum(row - ahead, 0), window or keys)
        seen = np.concatenate([[0.0], np.cumsum(visible_pairs, dtype=float)])[at]
    else:
        visible_pairs = np.minimum(np.arange(length) + ahead + 1, window or keys)
        seen = np.concatenate([[0.0], np.cumsum(visible_pairs, dtype=float)])[at]
    count = max(1, int(np.ceil(seen[-1] / pairs)))
    shares = seen[-1] * np.arange(1, count) / count
    cuts = sorted({0, length, *(int(at[place]) for place in np.searchsorted(seen, shares))})
    return list(pairwise(cuts))
