"""The inputs of a group of chunks and the gradients returned for it, in the layout that scalar.py and channel.py share.

In the shapes, n is the number of chunks, B the batch, K the number of key heads, R the number of value heads per key
head, and C the number of tokens per chunk. A state is [B, K, R, Dv, Dk].
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class MatrixProducts(NamedTuple):
    """The matrix products of arrays in fp32, with operands and results in `dtype`; sums are in fp32."""

    dtype: mx.Dtype = mx.float32

    def of(self, a: mx.array, b: mx.array) -> mx.array:
        """Return a b."""
        return (a.astype(self.dtype) @ b.astype(self.dtype)).astype(mx.float32)

    def added(self, c: mx.array, a: mx.array, b: mx.array, sign: float = 1.0) -> mx.array:
        """Return c + sign a b."""
        return mx.addmm(c, a, b, alpha=sign) if self.dtype == mx.float32 else c + sign * self.of(a, b)


IN_FP32 = MatrixProducts()


class Group(NamedTuple):
    """The inputs of n chunks, in fp32. `qk` stacks q above k, so that one product serves both."""

    products: MatrixProducts
    qk: mx.array  # [n, B, K, 1, 2C, Dk]
    v: mx.array  # [n, B, K, R, C, Dv]
    log_g: mx.array  # [n, B, K, R, C] or [n, B, K, R, C, Dk]
    beta: mx.array | None = None  # [n, B, K, R, C]; None where nothing is erased (linear attention)

    @property
    def reads(self) -> mx.array:
        """The rows that read the state: q and, for the erase, k."""
        return self.q if self.beta is None else self.qk

    @property
    def q(self) -> mx.array:
        return self.qk[..., : self.v.shape[-2], :]

    @property
    def k(self) -> mx.array:
        return self.qk[..., self.v.shape[-2] :, :]


class Gradients(NamedTuple):
    """Gradients of one group's inputs and of the state before it, in the group's layout.

    The axis R of the gradients of q and k has length 1: they are summed over the value heads of a key head.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    beta: mx.array | None
    state: mx.array


def sum_over_value_heads(x: mx.array) -> mx.array:
    """Sum x [n, B, K, R, ...] over the value heads that share a key head, to [n, B, K, 1, ...]."""
    return x if x.shape[3] == 1 else x.sum(axis=3, keepdims=True)
