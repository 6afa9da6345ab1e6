"""One group of chunks with a scalar gate per head: forward, and the hand-derived backward (README.md, section 3).

Shapes: n chunks, batch B, key heads K, value heads R per key head, C tokens a chunk. A state is [B, K, R, Dv, Dk].
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .triangular import unit_lower_inverse


class Group(NamedTuple):
    """Inputs of n chunks, fp32. `qk` holds q over k, so that one product serves both."""

    qk: mx.array  # [n, B, K, 1, 2C, Dk]
    v: mx.array  # [n, B, K, R, C, Dv]
    log_g: mx.array  # [n, B, K, R, C]
    beta: mx.array  # [n, B, K, R, C]


class _Inside(NamedTuple):
    """What a chunk knows without its incoming state."""

    from_start: mx.array  # [n, B, K, R, C]: decay from the chunk's start to after each step
    to_end: mx.array  # [n, B, K, R, C]: decay from after each step to the chunk's end
    gram: mx.array  # [n, B, K, R, 2C, C]: decayed q k^T (lower) over decayed k k^T (strictly lower)
    decay: mx.array  # [n, B, K, R, 2C, C]
    inverse: mx.array  # [n, B, K, R, C, C]: of I + beta times the strictly lower half of gram
    written: mx.array  # [n, B, K, R, C, Dv]: the deltas had the state been zero
    removed: mx.array  # [n, B, K, R, C, Dk]: what the incoming state takes off them


def _decays(log_g: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Products of gates over every span: from_start, to_end, and [.., 2C, C] lower over strictly lower."""
    size = log_g.shape[-1]
    gate = mx.exp(log_g)
    rows = mx.arange(size)[:, None]
    columns = mx.arange(size)[None, :]
    spans = mx.where(columns <= rows, gate[..., None, :], 1.0)
    products = mx.cumprod(spans, axis=-1, reverse=True, inclusive=False)
    lower = mx.where(columns <= rows, products, 0.0)
    strict = mx.where(columns < rows, products, 0.0)
    return mx.cumprod(gate, axis=-1), lower[..., -1, :], mx.concatenate([lower, strict], axis=-2)


def _inside(group: Group) -> _Inside:
    size = group.v.shape[-2]
    k = group.qk[..., size:, :]
    from_start, to_end, decay = _decays(group.log_g)
    gram = (group.qk @ k.swapaxes(-1, -2)) * decay
    inverse = unit_lower_inverse(group.beta[..., None] * gram[..., size:, :])
    solve = inverse * group.beta[..., None, :]
    removed = (solve * from_start[..., None, :]) @ k
    return _Inside(from_start, to_end, gram, decay, inverse, solve @ group.v, removed)


def forward(group: Group, state: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """y [n, B, K, R, C, Dv], the states before each chunk [n, B, K, R, Dv, Dk], and the state after the last."""
    count, size = group.v.shape[0], group.v.shape[-2]
    q, k = group.qk[..., :size, :], group.qk[..., size:, :]
    inside = _inside(group)
    states, deltas = [], []
    for n in range(count):
        states.append(state)
        delta = mx.addmm(inside.written[n], inside.removed[n], state.swapaxes(-1, -2), alpha=-1.0)
        deltas.append(delta)
        kept = state * inside.from_start[n, ..., -1:, None]
        state = mx.addmm(kept, (delta * inside.to_end[n][..., None]).swapaxes(-1, -2), k[n])
    before = mx.stack(states)
    recalled = (q @ before.swapaxes(-1, -2)) * inside.from_start[..., None]
    y = mx.addmm(recalled, inside.gram[..., :size, :], mx.stack(deltas))
    return y, before, state


class Gradients(NamedTuple):
    """Of one group; those of q and k summed over the value heads of a key head."""

    qk: mx.array  # [n, B, K, 2C, Dk]
    v: mx.array  # [n, B, K, R, C, Dv]
    log_g: mx.array  # [n, B, K, R, C]
    beta: mx.array  # [n, B, K, R, C]
    state: mx.array  # [B, K, R, Dv, Dk]


def backward(group: Group, before: mx.array, dy: mx.array, dstate: mx.array) -> Gradients:
    """From dy [n, B, K, R, C, Dv] and the gradient of the state after the group."""
    count, size = group.v.shape[0], group.v.shape[-2]
    q, k = group.qk[..., :size, :], group.qk[..., size:, :]
    inside = _inside(group)
    delta = mx.addmm(inside.written, inside.removed, before.swapaxes(-1, -2), alpha=-1.0)

    # Backwards across chunks: ddelta is the gradient of delta, dafter that of the state after each chunk.
    kept_k = k * inside.to_end[..., None]
    from_y = inside.gram[..., :size, :].swapaxes(-1, -2) @ dy
    recalled = (dy * inside.from_start[..., None]).swapaxes(-1, -2) @ q
    ddeltas: list[mx.array] = []
    dafters: list[mx.array] = []
    for n in reversed(range(count)):
        dafters.append(dstate)
        ddelta = mx.addmm(from_y[n], kept_k[n], dstate.swapaxes(-1, -2))
        ddeltas.append(ddelta)
        dstate = recalled[n] + dstate * inside.from_start[n, ..., -1:, None]
        dstate = mx.addmm(dstate, ddelta.swapaxes(-1, -2), inside.removed[n], alpha=-1.0)
    dafter, ddelta = mx.stack(dafters[::-1]), mx.stack(ddeltas[::-1])
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
    k = group.qk[..., size:, :]
    dr = inside.inverse.swapaxes(-1, -2) @ ddelta
    rows = mx.concatenate([dy, -dr], axis=-2)
    by_state = rows @ before
    by_gram = rows @ delta.swapaxes(-1, -2)
    by_end = delta @ dafter

    beta_rows = mx.concatenate([mx.ones_like(group.beta), group.beta], axis=-1)
    start_rows = mx.concatenate([inside.from_start, inside.from_start], axis=-1)
    weights = _over_value_heads(by_gram * inside.decay * beta_rows[..., None])
    dqk = mx.addmm(_over_value_heads(by_state * (start_rows * beta_rows)[..., None]), weights, k)
    dk = mx.addmm(_over_value_heads(by_end * inside.to_end[..., None]), weights.swapaxes(-1, -2), group.qk)
    dqk = mx.concatenate([dqk[..., :size, :], dqk[..., size:, :] + dk], axis=-2)

    # Every term's share in the gates it decayed through: spans of pairs, from the start, to the end, and all across.
    pairs = by_gram * inside.gram
    starts = (by_state * group.qk).sum(axis=-1) * start_rows
    ends = (by_end * k).sum(axis=-1) * inside.to_end
    across = (dafter * before).sum(axis=(-1, -2)) * inside.from_start[..., -1]
    dbeta = (dr * group.v).sum(axis=-1) + starts[..., size:] + pairs[..., size:, :].sum(axis=-1)
    starts = starts[..., :size] + group.beta * starts[..., size:]
    pairs = pairs[..., :size, :] + group.beta[..., None] * pairs[..., size:, :]
    dlog_g = mx.cumsum(starts, axis=-1, reverse=True) + mx.cumsum(ends, axis=-1, inclusive=False) + across[..., None]
    dv = dr * group.beta[..., None]
    return Gradients(dqk.squeeze(3), dv, dlog_g + _spanning(pairs), dbeta, dafter)


def _over_value_heads(x: mx.array) -> mx.array:
    """Sum over the value heads that share a key head, the axis kept."""
    return x if x.shape[3] == 1 else x.sum(axis=3, keepdims=True)


def _spanning(pairs: mx.array) -> mx.array:
    """[.., C, C] -> [.., C]: at t, the sum over i >= t > j. Sums only what spans t: a difference would cancel."""
    size = pairs.shape[-1]
    earlier = mx.cumsum(pairs, axis=-1, inclusive=False)
    return mx.where(mx.arange(size)[None, :] <= mx.arange(size)[:, None], earlier, 0.0).sum(axis=-2)
