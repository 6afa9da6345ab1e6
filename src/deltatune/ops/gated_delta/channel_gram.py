"""Decayed q k^T and k k^T when every key channel has a gate of its own: a chunk halved again and again.

With a gate per channel the decay between two tokens is a vector, so it must go into the operands. At each level,
tokens of a block's second half meet those of its first half, and the decay between them splits at the boundary: a
row carries the product of gates from the boundary to itself, a column that from itself to the boundary. Both are
products of gates, so neither exceeds 1, and nothing is divided (README.md, section 4).
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class Level(NamedTuple):
    """Blocks of two halves of w tokens: m = C / (2w) of them."""

    to_row: mx.array  # [..., m, w, Dk]: from the boundary to after each token of the second half
    from_column: mx.array  # [..., m, w, Dk]: from after each token of the first half to the boundary


def levels(gate: mx.array) -> tuple[list[Level], mx.array, mx.array]:
    """For gate [..., C, Dk], C a power of two: levels w = 1, 2, .. C / 2; decays from_start and to_end [..., C, Dk]."""
    *batch, size, channels = gate.shape
    prefix, suffix = gate, mx.ones_like(gate)
    found = []
    width = 1
    while width < size:
        split = (*batch, size // (2 * width), 2, width, channels)
        prefix, suffix = prefix.reshape(split), suffix.reshape(split)
        first, second = prefix[..., 0, :, :], prefix[..., 1, :, :]
        found.append(Level(second, suffix[..., 0, :, :]))
        whole_first, whole_second = first[..., -1:, :], second[..., -1:, :]
        prefix = mx.concatenate([first, second * whole_first], axis=-2)
        suffix = mx.concatenate([suffix[..., 0, :, :] * whole_second, suffix[..., 1, :, :]], axis=-2)
        width *= 2
    return found, prefix.reshape(gate.shape), suffix.reshape(gate.shape)


def gram(qk: mx.array, tower: list[Level]) -> mx.array:
    """qk [..., 2, C, Dk] -> [..., 2, C, C]: q k^T lower triangular, and k k^T strictly lower, both decayed."""
    diagonal = (qk[..., 0, :, :] * qk[..., 1, :, :]).sum(axis=-1)
    diagonal = mx.stack([diagonal, mx.zeros_like(diagonal)], axis=-2)[..., None, None]
    result = mx.broadcast_to(diagonal, (*tower[0].to_row.shape[:-3], *diagonal.shape[-4:]))
    for level in tower:
        rows, columns = _operands(qk, level)
        corner = rows @ columns.swapaxes(-1, -2)
        first, second = result[..., 0::2, :, :], result[..., 1::2, :, :]
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        result = mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
    return result.squeeze(-3)


def gram_backward(qk: mx.array, tower: list[Level], dgram: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """From dgram [..., 2, C, C]: gradients of q, k and log gate, each [..., C, Dk]. Its upper half is not read."""
    size, channels = qk.shape[-2:]
    shape = (*dgram.shape[:-3], size, channels)
    dq, dk, dlog = mx.zeros(shape), mx.zeros(shape), mx.zeros(shape)
    blocks = dgram[..., None, :, :]
    for level in reversed(tower):
        width = level.to_row.shape[-2]
        rows, columns = _operands(qk, level)
        corner = blocks[..., width:, :width]
        drows = corner @ columns
        dcolumns = (corner.swapaxes(-1, -2) @ rows).sum(axis=-4)
        spans_rows = mx.cumsum((rows * drows).sum(axis=-4), axis=-2, reverse=True)
        spans_columns = mx.cumsum(columns.squeeze(-4) * dcolumns, axis=-2, inclusive=False)
        drows = drows * level.to_row[..., None, :, :, :]
        dcolumns = dcolumns * level.from_column
        dq = dq + _halves(mx.zeros_like(dcolumns), drows[..., 0, :, :, :], shape)
        dk = dk + _halves(dcolumns, drows[..., 1, :, :, :], shape)
        dlog = dlog + _halves(spans_columns, spans_rows, shape)
        blocks = mx.stack([blocks[..., :width, :width], blocks[..., width:, width:]], axis=-3)
        blocks = blocks.reshape(*blocks.shape[:-4], -1, width, width)
    diagonal = blocks[..., 0, :, 0, :]
    return dq + diagonal * qk[..., 1, :, :], dk + diagonal * qk[..., 0, :, :], dlog


def _operands(qk: mx.array, level: Level) -> tuple[mx.array, mx.array]:
    """Decayed rows [..., 2, m, w, Dk] of both q and k, and columns [..., 1, m, w, Dk] of k."""
    width, channels = level.to_row.shape[-2:]
    split = qk.reshape(*qk.shape[:-2], -1, 2, width, channels)
    rows = split[..., 1, :, :] * level.to_row[..., None, :, :, :]
    columns = split[..., 1:, :, 0, :, :] * level.from_column[..., None, :, :, :]
    return rows, columns


def _halves(first: mx.array, second: mx.array, shape: tuple[int, ...]) -> mx.array:
    """[..., m, w, Dk] twice -> [..., C, Dk]."""
    return mx.concatenate([first, second], axis=-2).reshape(shape)
