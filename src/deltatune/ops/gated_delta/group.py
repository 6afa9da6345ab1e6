"""What both kinds of gate share: the inputs of a group of chunks, and the gradients it hands back.

Shapes: n chunks, batch B, K key heads, R value heads to a key head, C tokens to a chunk; a state is [B, K, R, Dv, Dk].
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class Group(NamedTuple):
    """Inputs of n chunks, fp32. `qk` holds q above k, so that one product serves both."""

    qk: mx.array  # [n, B, K, 1, 2C, Dk]
    v: mx.array  # [n, B, K, R, C, Dv]
    log_g: mx.array  # [n, B, K, R, C] or [n, B, K, R, C, Dk]
    beta: mx.array  # [n, B, K, R, C]

    @property
    def q(self) -> mx.array:
        return self.qk[..., : self.v.shape[-2], :]

    @property
    def k(self) -> mx.array:
        return self.qk[..., self.v.shape[-2] :, :]


class Gradients(NamedTuple):
    """Of one group's inputs and of the state before it; q and k keep an axis of 1 for their value heads."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    beta: mx.array
    state: mx.array


def over_value_heads(x: mx.array) -> mx.array:
    """Sum over the value heads that share a key head, the axis kept."""
    return x if x.shape[3] == 1 else x.sum(axis=3, keepdims=True)
