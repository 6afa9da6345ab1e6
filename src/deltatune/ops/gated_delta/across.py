"""The only sequential part: states from chunk to chunk forwards, their gradients backwards. Either kind of gate.

Within a chunk, delta = solved_v - solved_k S^T; then S becomes S total + delta^T decayed_k (README.md, section 2).
Shapes: n chunks, then batch dimensions; total broadcasts over a state [Dv, Dk].
"""

from __future__ import annotations

import mlx.core as mx


def forward_across(
    solved_v: mx.array, solved_k: mx.array, decayed_k: mx.array, total: mx.array, state: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """(states before each chunk [n, ..., Dv, Dk], deltas [n, ..., C, Dv], the state after the last)."""
    states, deltas = [], []
    for u, w, k, g in zip(*map(_chunks, (solved_v, solved_k, decayed_k, total)), strict=True):
        states.append(state)
        delta = mx.addmm(u, w, state.swapaxes(-1, -2), alpha=-1.0)
        deltas.append(delta)
        state = mx.addmm(state * g, delta.swapaxes(-1, -2), k)
    return mx.stack(states), mx.stack(deltas), state


def backward_across(
    from_y: mx.array, recalled: mx.array, solved_k: mx.array, decayed_k: mx.array, total: mx.array, dstate: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """(gradients of the deltas, of the states after each chunk, of the state before the first).

    from_y [n, ..., C, Dv] and recalled [n, ..., Dv, Dk] are what the outputs alone give to delta and to the state.
    """
    ddeltas, dafters = [], []
    parts = list(zip(*map(_chunks, (from_y, recalled, solved_k, decayed_k, total)), strict=True))
    for y, read, w, k, g in reversed(parts):
        dafters.append(dstate)
        ddelta = mx.addmm(y, k, dstate.swapaxes(-1, -2))
        ddeltas.append(ddelta)
        dstate = mx.addmm(read + dstate * g, ddelta.swapaxes(-1, -2), w, alpha=-1.0)
    return mx.stack(ddeltas[::-1]), mx.stack(dafters[::-1]), dstate


def _chunks(x: mx.array) -> list[mx.array]:
    """Views of the chunks; indexing with a number would gather, that is copy, each."""
    return [part.squeeze(0) for part in mx.split(x, x.shape[0])]
