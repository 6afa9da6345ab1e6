"""The chunkwise form: matrix products inside chunks, a short loop across them, and a backward pass of its own.

The forward pass keeps one state per chunk. The backward pass walks the chunks in reverse, a group at a time, and
recomputes everything else. The derivation is in README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from . import channel, scalar
from .gates import effective_gates
from .group import Group
from .layout import Cut, chunked, cut, joined


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
    batch, _, value_heads, value_size = v.shape
    log_g, beta = effective_gates(log_g, beta, mask, segments)
    if initial_state is None:
        initial_state = mx.zeros((batch, value_heads, value_size, k.shape[-1]), dtype=mx.float32)
    y, state = _forward(q, k, v, log_g, beta, initial_state.astype(mx.float32))[:2]
    if mask is not None:
        y = mx.where(mask[..., None, None], y, mx.zeros((), y.dtype))
    return y, state


def _cut(v: mx.array, k: mx.array) -> Cut:
    return cut(v.shape[1], v.shape[0] * v.shape[2], k.shape[-1])


def _group(
    inputs: Sequence[mx.array], span: tuple[int, int, int], size: int, after: mx.array
) -> tuple[Group, list[mx.array]]:
    """The chunks of one group, not laid out before `after` is known, so that groups do not pile up in memory."""
    key_heads = inputs[1].shape[2]
    q, k, v, log_g, beta, *more = mx.depends(list(inputs), [after])
    parts = [chunked(x, span, size, key_heads) for x in (q, k, v, log_g, beta, *more)]
    q, k, v, log_g, beta, *more = parts
    qk = mx.concatenate([q, k], axis=-2)
    return Group(qk, mx.contiguous(v), log_g, beta), [mx.contiguous(x) for x in more]


@mx.custom_function
def _forward(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, ...]:
    """y, the final state, and for each group the states before its chunks."""
    plan = _cut(v, k)
    inside = channel if log_g.ndim == 4 else scalar
    key_heads = k.shape[2]
    carry = state.reshape(state.shape[0], key_heads, -1, *state.shape[2:])
    outputs, saved = [], []
    for span in plan.groups():
        group, _ = _group((q, k, v, log_g, beta), span, plan.size, carry)
        y, before, carry = inside.forward(group, carry)
        outputs.append(y)
        saved.append(before)
    return joined(outputs, plan.length, q.dtype), carry.reshape(state.shape), *saved


@_forward.vjp
def _forward_vjp(
    primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
) -> tuple[mx.array, ...]:
    q, k, v, log_g, beta, _ = primals
    dy, dstate = cotangents[:2]
    return tuple(_backward(q, k, v, log_g, beta, dy, dstate, *outputs[2:]))


@mx.custom_function
def _backward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    dy: mx.array,
    dstate: mx.array,
    *saved: mx.array,
) -> tuple[mx.array, ...]:
    """Gradients of q, k, v, log_g, beta and the initial state, in their dtypes."""
    plan = _cut(v, k)
    inside = channel if log_g.ndim == 4 else scalar
    carry = dstate.reshape(dstate.shape[0], k.shape[2], -1, *dstate.shape[2:])
    dq, dk, dv, dlog_g, dbeta = [], [], [], [], []
    for span, before in zip(reversed(plan.groups()), reversed(saved), strict=True):
        group, (dy_part,) = _group((q, k, v, log_g, beta, dy), span, plan.size, carry)
        gradients = inside.backward(group, before, dy_part, carry)
        carry = gradients.state
        dq.append(gradients.q)
        dk.append(gradients.k)
        dv.append(gradients.v)
        dlog_g.append(gradients.log_g)
        dbeta.append(gradients.beta)
    results = [
        joined(parts[::-1], plan.length, x.dtype)
        for parts, x in zip((dq, dk, dv, dlog_g, dbeta), (q, k, v, log_g, beta), strict=True)
    ]
    return *results, carry.reshape(dstate.shape)


@_backward.vjp
def _backward_vjp(*_: object) -> tuple[mx.array, ...]:
    raise NotImplementedError(
        "gated_delta has no second derivative: its backward pass is written by hand. "
        "Use DELTATUNE_GATED_DELTA=naive where one is needed."
    )
