"""One group of chunks with one gate per head and token: forward, and the backward of README.md, section 3."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .across import backward_across, forward_across
from .group import Gradients, Group, over_value_heads
from .triangular import unit_lower_inverse


class _Inside(NamedTuple):
    """What a chunk knows without its incoming state."""

    from_start: mx.array  # [n, B, K, R, C]: decay from the chunk's start to after each step
    to_end: mx.array  # [n, B, K, R, C]: decay from after each step to the chunk's end
    total: mx.array  # [n, B, K, R, 1, 1]: decay over the whole chunk
    decay: mx.array  # [n, B, K, R, 2C, C]: over every span, lower above strictly lower
    gram: mx.array  # [n, B, K, R, 2C, C]: q k^T above k k^T, decayed
    inverse: mx.array  # [n, B, K, R, C, C]: of I + beta times the lower half of gram
    solved_v: mx.array  # [n, B, K, R, C, Dv]: the deltas had the state been zero
    solved_k: mx.array  # [n, B, K, R, C, Dk]: what the incoming state takes off them
    decayed_k: mx.array  # [n, B, K, R, C, Dk]: k, decayed to the chunk's end


def _decays(log_g: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """from_start, to_end and decay, each a product of the gates of its span alone: exact zeros, no cancelling."""
    size = log_g.shape[-1]
    gate = mx.exp(log_g)
    lower = mx.tri(size)
    spans = mx.where(lower.astype(mx.bool_), gate[..., None, :], 1.0)
    products = mx.cumprod(spans, axis=-1, reverse=True, inclusive=False)
    decay = products[..., None, :, :] * mx.stack([lower, mx.tri(size, k=-1)])
    return mx.cumprod(gate, axis=-1), products[..., -1, :], mx.flatten(decay, -3, -2)


def _inside(group: Group) -> _Inside:
    from_start, to_end, decay = _decays(group.log_g)
    gram = (group.qk @ group.k.swapaxes(-1, -2)) * decay
    inverse = unit_lower_inverse(group.beta[..., None] * gram[..., group.v.shape[-2] :, :])
    solve = inverse * group.beta[..., None, :]
    solved_k = (solve * from_start[..., None, :]) @ group.k
    return _Inside(
        from_start=from_start,
        to_end=to_end,
        total=from_start[..., -1:, None],
        decay=decay,
        gram=gram,
        inverse=inverse,
        solved_v=solve @ group.v,
        solved_k=solved_k,
        decayed_k=group.k * to_end[..., None],
    )


def forward(group: Group, state: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """y [n, B, K, R, C, Dv], the states before each chunk [n, B, K, R, Dv, Dk], and the state after the last."""
    inside = _inside(group)
    before, delta, state = forward_across(inside.solved_v, inside.solved_k, inside.decayed_k, inside.total, state)
    recalled = (group.q @ before.swapaxes(-1, -2)) * inside.from_start[..., None]
    return mx.addmm(recalled, inside.gram[..., : group.v.shape[-2], :], delta), before, state


def backward(group: Group, before: mx.array, dy: mx.array, dstate: mx.array) -> Gradients:
    """From dy [n, B, K, R, C, Dv] and the gradient of the state after the group."""
    inside = _inside(group)
    delta = mx.addmm(inside.solved_v, inside.solved_k, before.swapaxes(-1, -2), alpha=-1.0)
    from_y = inside.gram[..., : dy.shape[-2], :].swapaxes(-1, -2) @ dy
    recalled = (dy * inside.from_start[..., None]).swapaxes(-1, -2) @ group.q
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
    size = dy.shape[-2]
    dr = inside.inverse.swapaxes(-1, -2) @ ddelta
    rows = mx.concatenate([dy, -dr], axis=-2)
    by_state = rows @ before
    by_gram = rows @ delta.swapaxes(-1, -2)
    by_end = delta @ dafter

    beta_rows = mx.concatenate([mx.ones_like(group.beta), group.beta], axis=-1)
    start_rows = mx.concatenate([inside.from_start, inside.from_start], axis=-1)
    weights = over_value_heads(by_gram * inside.decay * beta_rows[..., None])
    dqk = mx.addmm(over_value_heads(by_state * (start_rows * beta_rows)[..., None]), weights, group.k)
    dk = mx.addmm(over_value_heads(by_end * inside.to_end[..., None]), weights.swapaxes(-1, -2), group.qk)

    # Every term's share in the gates it decayed through: from the start, to the end, all across, and between pairs.
    starts = (by_state * group.qk).sum(axis=-1) * start_rows
    ends = (by_end * group.k).sum(axis=-1) * inside.to_end
    across = (dafter * before).sum(axis=-1).sum(axis=-1) * inside.from_start[..., -1]
    pairs = by_gram * inside.gram
    dbeta = (dr * group.v).sum(axis=-1) + starts[..., size:] + pairs[..., size:, :].sum(axis=-1)
    starts = starts[..., :size] + group.beta * starts[..., size:]
    pairs = pairs[..., :size, :] + group.beta[..., None] * pairs[..., size:, :]
    dlog_g = mx.cumsum(starts, axis=-1, reverse=True) + mx.cumsum(ends, axis=-1, inclusive=False)
    dlog_g = dlog_g + across[..., None] + _spanning(pairs)
    return Gradients(
        q=dqk[..., :size, :],
        k=dqk[..., size:, :] + dk,
        v=dr * group.beta[..., None],
        log_g=dlog_g,
        beta=dbeta,
        state=dafter,
    )


def _spanning(pairs: mx.array) -> mx.array:
    """[.., C, C] -> [.., C]: at t, the sum over i >= t > j. Sums only what spans t: a difference would cancel."""
    size = pairs.shape[-1]
    earlier = mx.cumsum(pairs, axis=-1, inclusive=False)
    return mx.where(mx.arange(size)[None, :] <= mx.arange(size)[:, None], earlier, 0.0).sum(axis=-2)
