"""The chunks of a group with one gate per head: the formulas of README.md, sections 2 and 3.

chunk.py calls the functions of this module where log_g is [B, T, Hv], and those of channel.py otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .across import AcrossGradients
from .group import Gradients, Group, sum_over_value_heads
from .triangular import unit_lower_inverse


class _Chunks(NamedTuple):
    """The parts of n chunks that do not depend on the states before them.

    Where nothing is erased, decay and gram have their first half alone, u is v, and inverse and w are None.
    """

    from_start: mx.array  # [n, B, K, R, C]: decay from the chunk's start to after each step
    to_end: mx.array  # [n, B, K, R, C]: decay from after each step to the chunk's end
    total: mx.array  # [n, B, K, R, 1, 1]: decay over the whole chunk
    decay: mx.array  # [n, B, K, R, 2C, C]: decay from column to row; lower triangular, stacked above strictly lower
    gram: mx.array  # [n, B, K, R, 2C, C]: q k^T stacked above k k^T, times decay
    inverse: mx.array | None  # [n, B, K, R, C, C]: the inverse of I + beta times the decayed k k^T
    u: mx.array  # [n, B, K, R, C, Dv]: the deltas that a zero state before the chunk would give
    w: mx.array | None  # [n, B, K, R, C, Dk]: the factor of the state before the chunk in the deltas
    k_end: mx.array  # [n, B, K, R, C, Dk]: k, decayed to the chunk's end


def _decays(log_g: mx.array, erases: bool) -> tuple[mx.array, mx.array, mx.array]:
    """Return from_start, to_end and decay: products of the gates of their own spans, so that a gate of 0 is exact."""
    size = log_g.shape[-1]
    gate = mx.exp(log_g)
    lower = mx.tri(size)
    spans = mx.where(lower.astype(mx.bool_), gate[..., None, :], 1.0)
    products = mx.cumprod(spans, axis=-1, reverse=True, inclusive=False)
    decay = products[..., None, :, :] * mx.stack([lower, mx.tri(size, k=-1)] if erases else [lower])
    return mx.cumprod(gate, axis=-1), products[..., -1, :], mx.flatten(decay, -3, -2)


def without_state(group: Group) -> _Chunks:
    """Compute everything about the chunks of a group that does not depend on a state."""
    from_start, to_end, decay = _decays(group.log_g, group.beta is not None)
    gram = group.products.of(group.reads, group.k.swapaxes(-1, -2)) * decay
    u = group.v
    w = None
    inverse = None
    if group.beta is not None:
        inverse = unit_lower_inverse(group.beta[..., None] * gram[..., group.v.shape[-2] :, :])
        solve = inverse * group.beta[..., None, :]
        u = group.products.of(solve, group.v)
        w = group.products.of(solve * from_start[..., None, :], group.k)
    return _Chunks(
        from_start=from_start,
        to_end=to_end,
        total=from_start[..., -1:, None],
        decay=decay,
        gram=gram,
        inverse=inverse,
        u=u,
        w=w,
        k_end=group.k * to_end[..., None],
    )


def outputs(group: Group, chunks: _Chunks, states: mx.array, delta: mx.array) -> mx.array:
    """Return y [n, B, K, R, C, Dv] from the states before each chunk and the deltas."""
    y_state = group.products.of(group.q, states.swapaxes(-1, -2)) * chunks.from_start[..., None]
    return group.products.added(y_state, chunks.gram[..., : group.v.shape[-2], :], delta)


def output_gradients(group: Group, chunks: _Chunks, dy: mx.array) -> tuple[mx.array, mx.array]:
    """Return the terms of dy [n, B, K, R, C, Dv] in the gradients of the deltas and of the states before each chunk."""
    ddelta_y = group.products.of(chunks.gram[..., : dy.shape[-2], :].swapaxes(-1, -2), dy)
    dstate_y = group.products.of((dy * chunks.from_start[..., None]).swapaxes(-1, -2), group.q)
    return ddelta_y, dstate_y


def input_gradients(
    group: Group,
    chunks: _Chunks,
    states: mx.array,
    delta: mx.array,
    dy: mx.array,
    across: AcrossGradients,
) -> Gradients:
    """Return the gradients of the group from those of its deltas and states; m and z are M and Z of README.md."""
    size = dy.shape[-2]
    products = group.products
    rows = dy
    d_right = across.deltas
    beta_rows = mx.ones_like(chunks.from_start)
    start_rows = chunks.from_start
    if group.beta is not None and chunks.inverse is not None:
        d_right = products.of(chunks.inverse.swapaxes(-1, -2), across.deltas)
        rows = mx.concatenate([dy, -d_right], axis=-2)
        beta_rows = mx.concatenate([mx.ones_like(group.beta), group.beta], axis=-1)
        start_rows = mx.concatenate([chunks.from_start, chunks.from_start], axis=-1)
    z = products.of(rows, states)
    m = products.of(rows, delta.swapaxes(-1, -2))
    dk_end = products.of(delta, across.states_after)

    weights = sum_over_value_heads(m * chunks.decay * beta_rows[..., None])
    dreads = products.added(sum_over_value_heads(z * (start_rows * beta_rows)[..., None]), weights, group.k)
    dk = products.added(sum_over_value_heads(dk_end * chunks.to_end[..., None]), weights.swapaxes(-1, -2), group.reads)

    # log g receives the sum of the terms with a span that contains it: from the chunk's start, to its end, across all
    # of it, and between two positions.
    starts = (z * group.reads).sum(axis=-1) * start_rows
    ends = (dk_end * group.k).sum(axis=-1) * chunks.to_end
    through = (across.states_after * states).sum(axis=-1).sum(axis=-1) * chunks.from_start[..., -1]
    pairs = m * chunks.gram
    dv = d_right
    dbeta = None
    if group.beta is not None:
        dbeta = (d_right * group.v).sum(axis=-1) + starts[..., size:] + pairs[..., size:, :].sum(axis=-1)
        starts = starts[..., :size] + group.beta * starts[..., size:]
        pairs = pairs[..., :size, :] + group.beta[..., None] * pairs[..., size:, :]
        dk = dreads[..., size:, :] + dk
        dv = d_right * group.beta[..., None]
    dlog_g = mx.cumsum(starts, axis=-1, reverse=True) + mx.cumsum(ends, axis=-1, inclusive=False)
    dlog_g = dlog_g + through[..., None] + _spanning(pairs)
    return Gradients(q=dreads[..., :size, :], k=dk, v=dv, log_g=dlog_g, beta=dbeta, state=across.state)


def _spanning(pairs: mx.array) -> mx.array:
    """Return [..., C]: at t, the sum of pairs [..., C, C] over i >= t > j.

    It adds only terms that span t. A difference of two running sums would lose them where the gate is tiny.
    """
    size = pairs.shape[-1]
    earlier = mx.cumsum(pairs, axis=-1, inclusive=False)
    return mx.where(mx.arange(size)[None, :] <= mx.arange(size)[:, None], earlier, 0.0).sum(axis=-2)
