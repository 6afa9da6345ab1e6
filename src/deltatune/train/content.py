"""Which numbers a run starts from, whatever their file is called: digests that a continuation must share."""

from __future__ import annotations

import hashlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import TrainConfig
from . import announce
from .tree import leaves

# Numbers sampled from a tensor. Another checkpoint of the same shape differs in nearly every number.
SAMPLED = 1024


def facts(model: nn.Module, config: TrainConfig) -> dict[str, str | None]:
    """What state.fingerprint adds to the options: the model's tensors, their numbers, and those of given adapters."""
    adapter = config.resume_adapter_file
    return {
        "model_tensors": announce.structure(model),
        "model_weights": weights_digest(model, config),
        "adapter_weights": None if adapter is None else file_digest(adapter),
    }


def weights_digest(model: nn.Module, config: TrainConfig) -> str:
    """A digest of numbers sampled evenly from every tensor that came from a checkpoint.

    Numbers that were drawn are left out, since another device may round them in another way: adapters, and all of a
    model that trains from scratch. The seed in the configuration decides those.
    """
    drawn = set() if config.fine_tune_type == "full" else {name for name, _ in leaves(model.trainable_parameters())}
    given = [(name, leaf) for name, leaf in sorted(leaves(model.parameters())) if name not in drawn]
    if config.from_scratch:
        given = []
    samples = [_sample(leaf) for _, leaf in given]
    mx.eval(samples)
    digest = hashlib.blake2b(digest_size=8)
    for (name, _), sample in zip(given, samples, strict=True):
        digest.update(name.encode())
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()


def file_digest(path: str | Path) -> str:
    """A digest of the file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:16]


def _sample(leaf: mx.array) -> mx.array:
    flat = leaf.reshape(-1)
    return flat[:: max(1, leaf.size // SAMPLED)].view(mx.uint8)
