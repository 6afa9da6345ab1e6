"""LoRA and DoRA on an embedding, dense or quantised, also where it serves as the model's output head.

Parameters are named and shaped as in mlx_lm.tuner: lora_a [vocabulary, r], lora_b [r, dims], m [vocabulary].
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .adapter import Adapter, norm_of_sum, row_norms, uniform, with_row_norms
from .weights import dense_weight


class LoRAEmbedding(Adapter):
    """An embedding with a low-rank update: embedding(ids) + scale * dropout(A[ids] B), [..., dims] for ids [...].

    Dropout sets values of the update to zero, and in `as_linear` its inputs.
    """

    base_name = "embedding"
    dense_class = nn.Embedding

    def begin(self, rank: int) -> None:
        vocabulary = self.embedding["weight"].shape[0]
        dims = dense_weight(self.embedding).shape[1]
        self.lora_a = uniform(vocabulary, (vocabulary, rank))
        self.lora_b = mx.zeros((rank, dims))

    def __call__(self, ids: mx.array) -> mx.array:
        y = self.embedding(ids)
        return y + (self.scale * self.dropout(self.lora_a[ids] @ self.lora_b)).astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits [..., vocabulary] of x [..., dims], for a head that is tied to the embedding."""
        update = (self.dropout(x) @ self.lora_b.T) @ self.lora_a.T
        return self.embedding.as_linear(x) + (self.scale * update).astype(x.dtype)

    def adapted_weight(self) -> mx.array:
        return dense_weight(self.embedding).astype(mx.float32) + (self.scale * self.lora_a) @ self.lora_b


class DoRAEmbedding(LoRAEmbedding):
    """An embedding with adapted rows of trained length m; the norm is a constant for the gradient."""

    kind = "dora"

    def begin(self, rank: int) -> None:
        super().begin(rank)
        self.m = row_norms(dense_weight(self.embedding))
        self._base_norm = self.m

    def __call__(self, ids: mx.array) -> mx.array:
        y = self.embedding(ids)
        update = self.scale * self.lora_a[ids] @ self.lora_b
        norm = mx.stop_gradient(mx.linalg.norm(y.astype(mx.float32) + update, axis=-1))
        y = y + self.dropout(update).astype(y.dtype)
        return (self.m[ids] / norm)[..., None].astype(y.dtype) * y

    def as_linear(self, x: mx.array) -> mx.array:
        return (self.m / self._adapted_norm()).astype(x.dtype) * super().as_linear(x)

    def _adapted_norm(self) -> mx.array:
        a = self.scale * mx.stop_gradient(self.lora_a)
        b = mx.stop_gradient(self.lora_b)
        inner_product = (self.embedding.as_linear(b).astype(mx.float32).T * a).sum(axis=1)
        return norm_of_sum(self._base_norm, inner_product, ((a @ (b @ b.T)) * a).sum(axis=1))

    def adapted_weight(self) -> mx.array:
        return with_row_norms(super().adapted_weight(), self.m)
