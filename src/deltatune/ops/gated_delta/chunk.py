"""The chunkwise form: matrix products inside chunks, a short loop across them, and a backward pass of its own.

The forward pass keeps one state per chunk. The backward pass walks the chunks in reverse, a group at a time, and
recomputes everything else. The derivation is in README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

import mlx.core as mx

from . import channel, scalar
from .batching import over_batch
from .chunking import Chunking, Span, blank, chunked, cut, tokens, write
from .gates import effective_gates
from .group import Group

_Arrays = tuple[mx.array, ...]
_Function = Callable[..., _Arrays]


def gated_delta_chunk(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    *,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    segments: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The chunkwise form with a hand-derived backward pass; arguments and result as `gated_delta`.

    Raises NotImplementedError when a second derivative is taken.

    Source: arXiv 2406.06484 (chunks), 2412.06464 (gates), 2510.26692 (gates per channel); README.md.
    """
    batch, length, value_heads, value_size = v.shape
    log_g, beta = effective_gates(log_g, beta, mask, segments)
    if initial_state is None:
        initial_state = mx.zeros((batch, value_heads, value_size, k.shape[-1]), dtype=mx.float32)
    forward = _forward_by(cut(length, batch * value_heads, k.shape[-1]))
    y, state, *_ = forward(q, k, v, log_g, beta, initial_state.astype(mx.float32))
    if mask is not None:
        y = mx.where(mask[..., None, None], y, mx.zeros((), y.dtype))
    return y, state


@lru_cache
def _forward_by(plan: Chunking) -> _Function:
    """f(q, k, v, log_g, beta, state) -> (y, final state, for each group the states before its chunks)."""
    forward = mx.custom_function(lambda *arrays: _forward(plan, *arrays))
    backward = mx.custom_function(lambda *arrays: _backward(plan, *arrays))
    call_forward, call_backward = cast(_Function, forward), cast(_Function, backward)
    saved = [1] * len(plan.groups())

    def vjp(primals: _Arrays, cotangents: _Arrays, outputs: _Arrays) -> _Arrays:
        return call_backward(*primals[:5], *cotangents[:2], *outputs[2:])

    def refuse(*_: object) -> None:
        raise NotImplementedError(
            "gated_delta has no second derivative: its backward pass is written by hand. "
            "Force the recurrence, DELTATUNE_GATED_DELTA=naive, where one is needed."
        )

    forward.vjp(vjp)
    backward.vjp(refuse)
    forward.vmap(over_batch(call_forward, [0] * 6, [0, 0, *saved]))
    backward.vmap(over_batch(call_backward, [0] * 7 + saved, [0] * 6))
    return call_forward


def _group(
    inputs: Sequence[mx.array], span: Span, size: int, after: Sequence[mx.array]
) -> tuple[Group, list[mx.array]]:
    """The chunks of one group, laid out in memory.

    An empty slice of `after` goes into each copy, so that no group is laid out before the one before it is done. The
    inputs are in the first group's: under mx.vmap, where one is mapped, all are (mx.addmm refuses to map c alone).
    """
    key_heads = inputs[1].shape[2]
    q, k, v, log_g, beta, *more = (chunked(x, span, size, key_heads) for x in inputs)
    nothing = mx.concatenate([x[..., :0].reshape(0) for x in after])

    def laid_out(*parts: mx.array) -> mx.array:
        shape = parts[0].shape
        return mx.concatenate([*parts, nothing.reshape(*shape[:4], 0, *shape[5:])], axis=4)

    return Group(laid_out(q, k), *map(laid_out, (v, log_g, beta))), [laid_out(x) for x in more]


def _forward(
    plan: Chunking, q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array
) -> _Arrays:
    inside = channel if log_g.ndim == 4 else scalar
    carry = state.reshape(state.shape[0], k.shape[2], -1, *state.shape[2:])
    outputs = blank(v.astype(q.dtype), plan, k.shape[2])
    saved: list[mx.array] = []
    after = [carry, q, k, v, log_g, beta]
    for span in plan.groups():
        group, _ = _group((q, k, v, log_g, beta), span, plan.size, after)
        y, before, carry = inside.forward(group, carry)
        write(outputs, y, span, plan)
        saved.append(before)
        after = [outputs, before, carry]
    return tokens(outputs, plan), carry.reshape(state.shape), *saved


def _backward(
    plan: Chunking,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    dy: mx.array,
    dstate: mx.array,
    *saved: mx.array,
) -> _Arrays:
    """Gradients of q, k, v, log_g, beta and the initial state, in their dtypes."""
    inside = channel if log_g.ndim == 4 else scalar
    carry = dstate.reshape(dstate.shape[0], k.shape[2], -1, *dstate.shape[2:])
    results = [blank(x, plan, k.shape[2]) for x in (q, k, v, log_g, beta)]
    after = [carry, q, k, v, log_g, beta, dy]
    for span, before in zip(reversed(plan.groups()), reversed(saved), strict=True):
        group, (dy_part,) = _group((q, k, v, log_g, beta, dy), span, plan.size, after)
        *parts, carry = inside.backward(group, before, dy_part, carry)
        for whole, part in zip(results, parts, strict=True):
            write(whole, part, span, plan)
        after = [*results, carry]
    return *(tokens(whole, plan) for whole in results), carry.reshape(dstate.shape)
