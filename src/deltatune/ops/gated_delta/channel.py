"""One group of chunks with a gate per key channel: forward, and the backward of README.md, section 4."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .across import backward_across, forward_across
from .channel_gram import Level, gram, gram_backward, levels
from .group import Gradients, Group, over_value_heads
from .triangular import unit_lower_inverse


class _Inside(NamedTuple):
    """What a chunk knows without its incoming state."""

    tower: list[Level]
    qk: mx.array  # [n, B, K, 1, 2, C, Dk]
    from_start: mx.array  # [n, B, K, R, C, Dk]: decay from the chunk's start to after each step
    to_end: mx.array  # [n, B, K, R, C, Dk]: decay from after each step to the chunk's end
    total: mx.array  # [n, B, K, R, 1, Dk]: decay over the whole chunk
    gram: mx.array  # [n, B, K, R, 2, C, C]: q k^T and k k^T, decayed
    inverse: mx.array  # [n, B, K, R, C, C]: of I + beta times the k k^T
    solved_v: mx.array  # [n, B, K, R, C, Dv]: the deltas had the state been zero
    solved_k: mx.array  # [n, B, K, R, C, Dk]: what the incoming state takes off them
    decayed_k: mx.array  # [n, B, K, R, C, Dk]: k, decayed to the chunk's end


def _inside(group: Group) -> _Inside:
    size = group.v.shape[-2]
    qk = group.qk.reshape(*group.qk.shape[:-2], 2, size, -1)
    tower, from_start, to_end = levels(mx.exp(group.log_g))
    products = gram(qk, tower)
    inverse = unit_lower_inverse(group.beta[..., None] * products[..., 1, :, :])
    solve = inverse * group.beta[..., None, :]
    return _Inside(
        tower=tower,
        qk=qk,
        from_start=from_start,
        to_end=to_end,
        total=from_start[..., -1:, :],
        gram=products,
        inverse=inverse,
        solved_v=solve @ group.v,
        solved_k=solve @ (group.k * from_start),
        decayed_k=group.k * to_end,
    )


def forward(group: Group, state: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """y [n, B, K, R, C, Dv], the states before each chunk [n, B, K, R, Dv, Dk], and the state after the last."""
    inside = _inside(group)
    before, delta, state = forward_across(inside.solved_v, inside.solved_k, inside.decayed_k, inside.total, state)
    recalled = (group.q * inside.from_start) @ before.swapaxes(-1, -2)
    return mx.addmm(recalled, inside.gram[..., 0, :, :], delta), before, state


def backward(group: Group, before: mx.array, dy: mx.array, dstate: mx.array) -> Gradients:
    """From dy [n, B, K, R, C, Dv] and the gradient of the state after the group."""
    inside = _inside(group)
    delta = mx.addmm(inside.solved_v, inside.solved_k, before.swapaxes(-1, -2), alpha=-1.0)
    from_y = inside.gram[..., 0, :, :].swapaxes(-1, -2) @ dy
    recalled = dy.swapaxes(-1, -2) @ (group.q * inside.from_start)
    ddelta, dafter, dstate = backward_across(from_y, recalled, inside.solved_k, inside.decayed_k, inside.total, dstate)
    return _inside_backward(group, inside, before, delta, dy, ddelta, dafter)._replace(state=dstate)


def _inside_backward(
    group: Group,
    inside: _Inside,
    before: mx.array,
    delta: mx.array,
    dy: mx.array,
    ddelta: mx.array,
    dafter: mx.array,
) -> Gradients:
    dr = inside.inverse.swapaxes(-1, -2) @ ddelta
    beta = group.beta[..., None]
    rows = mx.stack([dy, -dr], axis=-3)
    by_gram = rows @ delta.swapaxes(-1, -2)[..., None, :, :]
    by_q = (dy @ before) * inside.from_start
    by_k = -(dr @ before) * inside.from_start
    by_end = (delta @ dafter) * inside.to_end

    by_beta = mx.stack([mx.ones_like(beta), beta], axis=-3)
    dq, dk, dlog_g = gram_backward(inside.qk, inside.tower, by_gram * by_beta)
    dq = dq + by_q
    dk = dk + beta * by_k + by_end

    # As with scalar gates, but each channel has its own sum.
    starts_k = by_k * group.k
    across = (dafter * before).sum(axis=-2, keepdims=True) * inside.total
    dlog_g = dlog_g + across + mx.cumsum(by_q * group.q + beta * starts_k, axis=-2, reverse=True)
    dlog_g = dlog_g + mx.cumsum(by_end * group.k, axis=-2, inclusive=False)
    pairs = (by_gram[..., 1, :, :] * inside.gram[..., 1, :, :]).sum(axis=-1)
    dbeta = (dr * group.v).sum(axis=-1) + starts_k.sum(axis=-1) + pairs
    return Gradients(
        q=over_value_heads(dq), k=over_value_heads(dk), v=dr * beta, log_g=dlog_g, beta=dbeta, state=dafter
    )
