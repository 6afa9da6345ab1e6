"""The only sequential part: states from chunk to chunk forwards, their gradients backwards. Either kind of gate.

Within a chunk, delta = written - removed S^T; then S becomes S total + delta^T kept_k (README.md, section 2).
Shapes: n chunks, then batch dimensions; total broadcasts over a state [Dv, Dk].
"""

from __future__ import annotations

import mlx.core as mx


def forward_across(
    written: mx.array, removed: mx.array, kept_k: mx.array, total: mx.array, state: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """(states before each chunk [n, ..., Dv, Dk], deltas [n, ..., C, Dv], the state after the last)."""
    states, deltas = [], []
    for n in range(written.shape[0]):
        states.append(state)
        delta = mx.addmm(written[n], removed[n], state.swapaxes(-1, -2), alpha=-1.0)
        deltas.append(delta)
        state = mx.addmm(state * total[n], delta.swapaxes(-1, -2), kept_k[n])
    return mx.stack(states), mx.stack(deltas), state


def backward_across(
    from_y: mx.array, recalled: mx.array, removed: mx.array, kept_k: mx.array, total: mx.array, dstate: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """(gradients of the deltas, of the states after each chunk, of the state before the first).

    from_y [n, ..., C, Dv] and recalled [n, ..., Dv, Dk] are what the outputs alone give to delta and to the state.
    """
    ddeltas, dafters = [], []
    for n in reversed(range(from_y.shape[0])):
        dafters.append(dstate)
        ddelta = mx.addmm(from_y[n], kept_k[n], dstate.swapaxes(-1, -2))
        ddeltas.append(ddelta)
        dstate = mx.addmm(recalled[n] + dstate * total[n], ddelta.swapaxes(-1, -2), removed[n], alpha=-1.0)
    return mx.stack(ddeltas[::-1]), mx.stack(dafters[::-1]), dstate
