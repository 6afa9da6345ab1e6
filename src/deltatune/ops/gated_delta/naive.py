"""The gated delta recurrence, computed one token after another.

It is the reference for every other implementation, and autodiff of it is the reference for their gradients.
"""

from __future__ import annotations

import mlx.core as mx


def gated_delta_naive(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array | None,
    *,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    segments: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute the recurrence by its definition. Arguments and results are those of `gated_delta`.

    Without `beta` they are those of `linear_attention`.

    It keeps every intermediate state for the backward pass, so it suits tests and second derivatives, not training.

    Source:
        Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), equation 10.
    """
    batch, _, value_heads, value_size = v.shape
    key_heads, key_size = k.shape[2:]
    q32, k32 = (mx.repeat(x.astype(mx.float32), value_heads // key_heads, axis=2) for x in (q, k))
    v32 = v.astype(mx.float32)
    rates = [] if beta is None else [beta.astype(mx.float32)]
    gate = mx.exp(log_g.astype(mx.float32))
    if gate.ndim == 3:
        gate = mx.broadcast_to(gate[..., None], (*gate.shape, key_size))
    state = mx.zeros((batch, value_heads, value_size, key_size), dtype=mx.float32)
    if initial_state is not None:
        state = initial_state.astype(mx.float32)

    outputs = []
    for t, token in enumerate(zip(*(_tokens(x) for x in (q32, k32, v32, gate, *rates)), strict=True)):
        if segments is not None and t > 0:
            same = segments[:, t] == segments[:, t - 1]
            state = mx.where(same[:, None, None, None], state, 0.0)
        stepped, y = _step(state, *token)
        if mask is not None:
            live = mask[:, t]
            stepped = mx.where(live[:, None, None, None], stepped, state)
            y = mx.where(live[:, None, None], y, 0.0)
        state = stepped
        outputs.append(y)
    return mx.stack(outputs, axis=1).astype(q.dtype), state


def _tokens(x: mx.array) -> list[mx.array]:
    """Return x[:, t] for every t; unlike the gradients of slices, those of a split are joined once."""
    return [token.squeeze(1) for token in mx.split(x, x.shape[1], axis=1)]


def _step(
    state: mx.array, q: mx.array, k: mx.array, v: mx.array, gate: mx.array, beta: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return the state and y after one token: state [B,H,Dv,Dk]; q, k, gate [B,H,Dk]; v, y [B,H,Dv]; beta [B,H]."""
    state = state * gate[..., None, :]
    delta = v
    if beta is not None:
        predicted = (state * k[..., None, :]).sum(axis=-1)
        delta = beta[..., None] * (v - predicted)
    state = state + delta[..., None] * k[..., None, :]
    return state, (state * q[..., None, :]).sum(axis=-1)
