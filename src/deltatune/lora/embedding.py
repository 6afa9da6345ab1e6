"""LoRA and DoRA on an embedding, plain or quantised, and on the head tied to it.

Names and shapes as in mlx_lm.tuner: lora_a [vocabulary, r], lora_b [r, dims], m [vocabulary].
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .adapter import Adapter, uniform
from .weights import dense_weight, with_weight


class LoRAEmbedding(Adapter):
    """embedding(ids) + scale * dropout(A[ids] B) for ids [...]; as_linear(x [..., dims]) serves a tied head."""

    base_name = "embedding"
    kind = "lora"

    def __init__(self, embedding: nn.Module, rank: int = 8, scale: float = 20.0, dropout: float = 0.0):
        super().__init__(embedding, scale, dropout)
        vocabulary, dims = embedding["weight"].shape[0], dense_weight(embedding).shape[1]
        self.lora_a = uniform(vocabulary, (vocabulary, rank))
        self.lora_b = mx.zeros((rank, dims))

    @property
    def rank(self) -> int:
        return self.lora_a.shape[1]

    def __call__(self, ids: mx.array) -> mx.array:
        y = self.embedding(ids)
        return y + (self.scale * self.dropout(self.lora_a[ids] @ self.lora_b)).astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., vocabulary] of x [..., dims] with the adapted weight."""
        update = (self.dropout(x) @ self.lora_b.T) @ self.lora_a.T
        return self.embedding.as_linear(x) + (self.scale * update).astype(x.dtype)

    def fuse(self, dequantize: bool = False) -> nn.Module:
        return with_weight(self.embedding, self._fused_weight(), nn.Embedding, dequantize)

    def _adapted(self) -> mx.array:
        return dense_weight(self.embedding).astype(mx.float32) + (self.scale * self.lora_a) @ self.lora_b

    def _fused_weight(self) -> mx.array:
        return self._adapted().astype(dense_weight(self.embedding).dtype)


class DoRAEmbedding(LoRAEmbedding):
    """Each adapted row keeps its direction and takes the trained length m; no gradient goes through the norm."""

    kind = "dora"

    def __init__(self, embedding: nn.Module, rank: int = 8, scale: float = 20.0, dropout: float = 0.0):
        super().__init__(embedding, rank, scale, dropout)
        self.m = mx.linalg.norm(dense_weight(embedding).astype(mx.float32), axis=1)
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
        a, b = self.scale * mx.stop_gradient(self.lora_a), mx.stop_gradient(self.lora_b)
        cross = (self.embedding.as_linear(b).astype(mx.float32).T * a).sum(axis=1)
        own = ((a @ (b @ b.T)) * a).sum(axis=1)
        return mx.sqrt(mx.maximum(self._base_norm**2 + 2 * cross + own, 0))

    def _fused_weight(self) -> mx.array:
        adapted = self._adapted()
        rescaled = (self.m / mx.linalg.norm(adapted, axis=1))[:, None] * adapted
        return rescaled.astype(dense_weight(self.embedding).dtype)
