"""Adds noise to the embeddings of tokens while a model trains (NEFTune)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .vocabulary import token_tables


@contextmanager
def noisy_embedding(model: nn.Module, alpha: float) -> Iterator[None]:
    """Within the context, add noise to each embedding that is looked up in training mode.

    It is drawn uniformly from -b to b with b = alpha / sqrt(T D), where rows have T tokens, padding included, and
    embeddings D numbers; the authors use an alpha of 5 to 15. The class of the embedding is a subclass of the same name
    meanwhile, and the model's modules must not be replaced.

    Source: arXiv 2310.05914; transformers' neftune_post_forward_hook.
    """
    embedding: Any = next(iter(token_tables(model).values()))
    original = type(embedding)

    def call(self: Any, tokens: mx.array) -> mx.array:
        embedded = original.__call__(self, tokens)
        if not self.training:
            return embedded
        bound = alpha / (embedded.shape[-2] * embedded.shape[-1]) ** 0.5
        return embedded + mx.random.uniform(-bound, bound, embedded.shape).astype(embedded.dtype)

    body = {"__call__": call, "__module__": original.__module__, "__qualname__": original.__qualname__}
    embedding.__class__ = type(original.__name__, (original,), body)
    try:
        yield
    finally:
        embedding.__class__ = original
