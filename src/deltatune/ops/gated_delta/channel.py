"""The chunks of a group with a gate per key channel: the formulas of README.md, section 4.

chunk.py calls the functions of this module where log_g is [B, T, Hv, Dk], and those of scalar.py otherwise.

The decay between two tokens is a vector, so it must be multiplied into the operands of q k^T and k k^T. A block of
tokens is cut into two halves. Between a token of the second half (a row of the product) and one of the first half (a
column), the decay is the product of two factors: that from the boundary to the row, and that from the column to the
boundary. Each factor is a product of gates, so it is at most 1, and nothing is divided. Blocks of 2, 4, ... C tokens
together contain every pair of tokens once.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .across import AcrossGradients
from .group import Gradients, Group, sum_over_value_heads
from .triangular import unit_lower_inverse


class Level(NamedTuple):
    """The decays in m = C / (2w) blocks, each of two halves of w tokens."""

    row_decay: mx.array  # [..., m, w, Dk]: from the boundary to after each token of the second half
    column_decay: mx.array  # [..., m, w, Dk]: from after each token of the first half to the boundary


def decay_levels(gate: mx.array) -> tuple[list[Level], mx.array, mx.array]:
    """Return the decays between all tokens of a chunk, from its gates [..., C, Dk], where C is a power of two.

    They are the levels for w = 1, 2, ... C / 2; the decay from the chunk's start to after each token [..., C, Dk]; and
    that from after each token to the chunk's end [..., C, Dk].
    """
    *batch, size, channels = gate.shape
    prefix = gate
    suffix = mx.ones_like(gate)
    levels = []
    width = 1
    while width < size:
        split = (*batch, size // (2 * width), 2, width, channels)
        prefix, suffix = prefix.reshape(split), suffix.reshape(split)
        first, second = prefix[..., 0, :, :], prefix[..., 1, :, :]
        levels.append(Level(second, suffix[..., 0, :, :]))
        first_total, second_total = first[..., -1:, :], second[..., -1:, :]
        prefix = mx.concatenate([first, second * first_total], axis=-2)
        suffix = mx.concatenate([suffix[..., 0, :, :] * second_total, suffix[..., 1, :, :]], axis=-2)
        width *= 2
    return levels, prefix.reshape(gate.shape), suffix.reshape(gate.shape)


def gram(qk: mx.array, levels: list[Level], products: int = 2) -> mx.array:
    """Return the decayed q k^T (lower triangular) and k k^T (strictly lower), [..., 2, C, C], of qk [..., 2, C, Dk].

    Of one product it is the first, [..., 1, C, C].
    """
    diagonal = (qk[..., 0, :, :] * qk[..., 1, :, :]).sum(axis=-1)
    diagonal = mx.stack([diagonal, mx.zeros_like(diagonal)][:products], axis=-2)[..., None, None]
    result = mx.broadcast_to(diagonal, (*levels[0].row_decay.shape[:-3], *diagonal.shape[-4:]))
    for level in levels:
        rows, columns = _operands(qk, level, products)
        corner = rows @ columns.swapaxes(-1, -2)
        first, second = result[..., 0::2, :, :], result[..., 1::2, :, :]
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        result = mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
    return result.squeeze(-3)


def gram_backward(qk: mx.array, levels: list[Level], dgram: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return the gradients of q, k and the log gates, each [..., C, Dk], from dgram [..., 2 or 1, C, C].

    Elements of dgram above its diagonal are not read.
    """
    size, channels = qk.shape[-2:]
    products = dgram.shape[-3]
    shape = (*dgram.shape[:-3], size, channels)
    dq, dk, dlog = mx.zeros(shape), mx.zeros(shape), mx.zeros(shape)
    blocks = dgram[..., None, :, :]
    for level in reversed(levels):
        width = level.row_decay.shape[-2]
        rows, columns = _operands(qk, level, products)
        corner = blocks[..., width:, :width]
        drows = corner @ columns
        dcolumns = (corner.swapaxes(-1, -2) @ rows).sum(axis=-4)
        spans_rows = mx.cumsum((rows * drows).sum(axis=-4), axis=-2, reverse=True)
        spans_columns = mx.cumsum(columns.squeeze(-4) * dcolumns, axis=-2, inclusive=False)
        drows = drows * level.row_decay[..., None, :, :, :]
        dcolumns = dcolumns * level.column_decay
        dq = dq + _joined(mx.zeros_like(dcolumns), drows[..., 0, :, :, :], shape)
        dk = dk + _joined(dcolumns, drows[..., 1, :, :, :] if products > 1 else mx.zeros_like(dcolumns), shape)
        dlog = dlog + _joined(spans_columns, spans_rows, shape)
        blocks = mx.stack([blocks[..., :width, :width], blocks[..., width:, width:]], axis=-3)
        blocks = blocks.reshape(*blocks.shape[:-4], -1, width, width)
    diagonal = blocks[..., 0, :, 0, :]
    return dq + diagonal * qk[..., 1, :, :], dk + diagonal * qk[..., 0, :, :], dlog


def _operands(qk: mx.array, level: Level, products: int) -> tuple[mx.array, mx.array]:
    """Return the decayed rows [..., products, m, w, Dk] of q and k, and the decayed columns [..., 1, m, w, Dk] of k."""
    width, channels = level.row_decay.shape[-2:]
    split = qk.reshape(*qk.shape[:-2], -1, 2, width, channels)
    rows = split[..., :products, :, 1, :, :] * level.row_decay[..., None, :, :, :]
    columns = split[..., 1:, :, 0, :, :] * level.column_decay[..., None, :, :, :]
    return rows, columns


def _joined(first: mx.array, second: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Return [..., C, Dk] from the first and second halves of the blocks, each [..., m, w, Dk]."""
    return mx.concatenate([first, second], axis=-2).reshape(shape)


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
