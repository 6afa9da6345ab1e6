"""The chunks of a group with a gate per key channel: the formulas of README.md, section 4.

chunk.py calls the functions of this module where log_g is [B, T, Hv, Dk], and those of scalar.py otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .across import AcrossGradients
from .channel_gram import Level, decay_levels, gram, gram_backward
from .group import Gradients, Group, sum_over_value_heads
from .triangular import unit_lower_inverse


class _Chunks(NamedTuple):
    """The parts of n chunks that do not depend on the states before them.

    Where nothing is erased, gram has its first product alone, u is v, and inverse and w are None.
    """

    levels: list[Level]  # decays between the halves of ever larger blocks
    qk: mx.array  # [n, B, K, 1, 2, C, Dk]
    from_start: mx.array  # [n, B, K, R, C, Dk]: decay from the chunk's start to after each step
    to_end: mx.array  # [n, B, K, R, C, Dk]: decay from after each step to the chunk's end
    total: mx.array  # [n, B, K, R, 1, Dk]: decay over the whole chunk
    gram: mx.array  # [n, B, K, R, 2, C, C]: q k^T and k k^T, decayed channel by channel
    inverse: mx.array | None  # [n, B, K, R, C, C]: the inverse of I + beta times the decayed k k^T
    u: mx.array  # [n, B, K, R, C, Dv]: the deltas that a zero state before the chunk would give
    w: mx.array | None  # [n, B, K, R, C, Dk]: the factor of the state before the chunk in the deltas
    k_end: mx.array  # [n, B, K, R, C, Dk]: k, decayed to the chunk's end


def without_state(group: Group) -> _Chunks:
    """Compute everything about the chunks of a group that does not depend on a state."""
    size = group.v.shape[-2]
    qk = group.qk.reshape(*group.qk.shape[:-2], 2, size, -1)
    levels, from_start, to_end = decay_levels(mx.exp(group.log_g))
    products = gram(qk, levels, 1 if group.beta is None else 2)
    u = group.v
    w = None
    inverse = None
    if group.beta is not None:
        inverse = unit_lower_inverse(group.beta[..., None] * products[..., 1, :, :])
        solve = inverse * group.beta[..., None, :]
        u = solve @ group.v
        w = solve @ (group.k * from_start)
    return _Chunks(
        levels=levels,
        qk=qk,
        from_start=from_start,
        to_end=to_end,
        total=from_start[..., -1:, :],
        gram=products,
        inverse=inverse,
        u=u,
        w=w,
        k_end=group.k * to_end,
    )


def outputs(group: Group, chunks: _Chunks, states: mx.array, delta: mx.array) -> mx.array:
    """Return y [n, B, K, R, C, Dv] from the states before each chunk and the deltas."""
    y_state = (group.q * chunks.from_start) @ states.swapaxes(-1, -2)
    return mx.addmm(y_state, chunks.gram[..., 0, :, :], delta)


def output_gradients(group: Group, chunks: _Chunks, dy: mx.array) -> tuple[mx.array, mx.array]:
    """Return the terms of dy [n, B, K, R, C, Dv] in the gradients of the deltas and of the states before each chunk."""
    ddelta_y = chunks.gram[..., 0, :, :].swapaxes(-1, -2) @ dy
    dstate_y = dy.swapaxes(-1, -2) @ (group.q * chunks.from_start)
    return ddelta_y, dstate_y


def input_gradients(
    group: Group,
    chunks: _Chunks,
    states: mx.array,
    delta: mx.array,
    dy: mx.array,
    across: AcrossGradients,
) -> Gradients:
    """Return the gradients of the group from those of its deltas and states; m is M of README.md."""
    dq_from_start = (dy @ states) * chunks.from_start
    dk_to_end = (delta @ across.states_after) * chunks.to_end
    dv = across.deltas
    dbeta = None
    dk_outside = dk_to_end
    reads = dq_from_start * group.q
    m = (dy @ delta.swapaxes(-1, -2))[..., None, :, :]
    if group.beta is not None and chunks.inverse is not None:
        d_right = chunks.inverse.swapaxes(-1, -2) @ across.deltas
        beta = group.beta[..., None]
        of_right = -d_right @ delta.swapaxes(-1, -2)
        dk_from_start = -(d_right @ states) * chunks.from_start
        starts = dk_from_start * group.k
        reads = reads + beta * starts
        pairs = (of_right * chunks.gram[..., 1, :, :]).sum(axis=-1)
        dbeta = (d_right * group.v).sum(axis=-1) + starts.sum(axis=-1) + pairs
        m = mx.concatenate([m, (beta * of_right)[..., None, :, :]], axis=-3)
        dv = d_right * beta
        dk_outside = beta * dk_from_start + dk_to_end
    dq, dk, dlog_g = gram_backward(chunks.qk, chunks.levels, m)

    # The terms are those of scalar.py, but each channel has a sum of its own.
    through = (across.states_after * states).sum(axis=-2, keepdims=True) * chunks.total
    dlog_g = dlog_g + through + mx.cumsum(reads, axis=-2, reverse=True)
    dlog_g = dlog_g + mx.cumsum(dk_to_end * group.k, axis=-2, inclusive=False)
    return Gradients(
        q=sum_over_value_heads(dq + dq_from_start),
        k=sum_over_value_heads(dk + dk_outside),
        v=dv,
        log_g=dlog_g,
        beta=dbeta,
        state=across.state,
    )
