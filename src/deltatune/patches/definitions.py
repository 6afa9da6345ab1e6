"""What some layers of upstream compute, in MLX's operations: what the kernels in their place are written for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def gated_norm(self: Any, x: mx.array, gate: mx.array) -> mx.array:
    """An RMS norm times silu of a gate."""
    return mx.fast.rms_norm(x, self.weight, self.eps) * gate * mx.sigmoid(gate)


def normalize_qk(q: mx.array, k: mx.array, *, inv_scale: float, eps: float) -> tuple[mx.array, mx.array]:
    """Queries and keys over the root of the sum of their squares; queries take the readout scale too."""

    def unit(x: mx.array) -> mx.array:
        return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + eps)

    return inv_scale * unit(q), unit(k)


def gated_attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    """Attention whose output is multiplied by the sigmoid of a gate that comes with the queries."""

    def heads(y: mx.array, count: int) -> mx.array:
        return mx.unflatten(y, -1, (count, -1))

    queries, gate = mx.split(heads(self.q_proj(x), self.num_attention_heads), 2, axis=-1)
    keys, values = (heads(each(x), self.num_key_value_heads) for each in (self.k_proj, self.v_proj))
    queries, keys = self.rope(self.q_norm(queries).swapaxes(1, 2)), self.rope(self.k_norm(keys).swapaxes(1, 2))
    y = mx.fast.scaled_dot_product_attention(queries, keys, values.swapaxes(1, 2), scale=self.scale, mask=mask)
    return self.o_proj(y.swapaxes(1, 2).flatten(2) * mx.sigmoid(gate.flatten(2)))


def residual_layer(mixer: Callable[[Any], Any]) -> Callable[..., mx.array]:
    """A decoder layer: x plus what its mixer makes of the normed x, then plus the MLP of that, normed."""

    def layer(self: Any, x: mx.array) -> mx.array:
        x = x + mixer(self)(self.input_layernorm(x), None, None)
        return x + self.mlp(self.post_attention_layernorm(x))

    return layer


def rms_norm(self: Any, x: mx.array) -> mx.array:
    """x over the root of the mean of its squares, times a weight."""
    return x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * self["weight"]


def embedding(self: Any, x: mx.array) -> mx.array:
    """The rows of a table for token ids."""
    return mx.take(self["weight"], x, axis=0)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) x."""
    return gate * mx.sigmoid(gate) * x


def silu(x: mx.array) -> mx.array:
    """x sigmoid(x)."""
    return x * mx.sigmoid(x)


def plain_norm(size: int) -> Callable[[Any], nn.Module]:
    """Build a norm, or a gated one, of so many channels."""
    return lambda cls: cls(size)
