"""The loop from chunk to chunk: states forwards, their gradients backwards, for either kind of gate.

It is the only sequential part of the chunkwise form. In the notation of README.md, section 2, a chunk with state S
before it has delta = U - W S^T, and leaves the state S decay + delta^T K_end, where K_end are its keys decayed to its
end. Where nothing is erased, W is None and delta is U. In the shapes, n is the number of chunks and dots are batch
axes; decay broadcasts over a state [Dv, Dk].
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .group import MatrixProducts


class AcrossGradients(NamedTuple):
    """The gradients of the results of the loop over n chunks; deltas are [n, ..., C, Dv], a state [..., Dv, Dk]."""

    deltas: mx.array
    states_after: mx.array
    state: mx.array


def forward_across(
    products: MatrixProducts, u: mx.array, w: mx.array | None, k_end: mx.array, decay: mx.array, state: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Carry the state [..., Dv, Dk] before the first of n chunks through all of them.

    The deltas that a zero state would give are `u` [n, ..., C, Dv]; `w` and `k_end` are [n, ..., C, Dk], and `decay` is
    [n, ..., 1, 1 or Dk]. Returned are the states before each chunk, the deltas, and the state after the last chunk.
    """
    states, deltas = [], []
    chunks = zip(*map(_chunks, (u, k_end, decay)), _factors(w, u), strict=True)
    for delta, chunk_k, chunk_decay, chunk_w in chunks:
        states.append(state)
        if chunk_w is not None:
            delta = products.added(delta, chunk_w, state.swapaxes(-1, -2), -1.0)
            deltas.append(delta)
        state = products.added(state * chunk_decay, delta.swapaxes(-1, -2), chunk_k)
    return mx.stack(states), u if w is None else mx.stack(deltas), state


def backward_across(
    products: MatrixProducts,
    ddelta_y: mx.array,
    dstate_y: mx.array,
    w: mx.array | None,
    k_end: mx.array,
    decay: mx.array,
    dstate: mx.array,
) -> AcrossGradients:
    """Carry `dstate`, the gradient of the state after the last of n chunks, back through all of them.

    The gradients that the outputs alone give are `ddelta_y` [n, ..., C, Dv], of the deltas, and `dstate_y` [n, ..., Dv,
    Dk], of the states before each chunk. The others are as in `forward_across`.
    """
    ddeltas, dstates_after = [], []
    factors = _factors(w, ddelta_y)
    chunks = list(zip(*map(_chunks, (ddelta_y, dstate_y, k_end, decay)), factors, strict=True))
    for chunk_ddelta, chunk_dstate, chunk_k, chunk_decay, chunk_w in reversed(chunks):
        dstates_after.append(dstate)
        ddelta = products.added(chunk_ddelta, chunk_k, dstate.swapaxes(-1, -2))
        ddeltas.append(ddelta)
        dstate = chunk_dstate + dstate * chunk_decay
        if chunk_w is not None:
            dstate = products.added(dstate, ddelta.swapaxes(-1, -2), chunk_w, -1.0)
    return AcrossGradients(mx.stack(ddeltas[::-1]), mx.stack(dstates_after[::-1]), dstate)


def _chunks(x: mx.array) -> list[mx.array]:
    """Split x into views of its chunks. Indexing with a number would gather each chunk, which copies it."""
    return [part.squeeze(0) for part in mx.split(x, x.shape[0])]


def _factors(w: mx.array | None, like: mx.array) -> list[mx.array] | list[None]:
    """Return w by chunks, or None for each chunk of `like`."""
    return [None] * like.shape[0] if w is None else _chunks(w)
