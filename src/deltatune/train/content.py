"""Computes digests of the weights that a run starts from, which a continued run must share.

The digests depend on the content alone, so that a model may be moved or renamed between a run and its continuation.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import TrainConfig
from . import announce
from .tree import leaves

# The numbers sampled from each tensor are enough: two checkpoints of one shape differ in nearly every number.
SAMPLED = 1024


def facts(model: nn.Module, config: TrainConfig) -> dict[str, str | None]:
    """Return what state.fingerprint adds to the options: digests of the structure, the weights and given adapters."""
    adapter = config.resume_adapter_file
    return {
        "model_tensors": announce.structure(model),
        "model_weights": weights_digest(model, config),
        "adapter_weights": None if adapter is None else file_digest(adapter),
    }


def weights_digest(model: nn.Module, config: TrainConfig) -> str:
    """Return a digest of numbers that are sampled evenly from every tensor of the checkpoint.

    Randomly initialised tensors are left out, since another device may round them differently: adapters, and all of a
    model that trains from scratch. The seed, one of the options that a continuation must share, determines those.
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
    """Return a digest of the file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:16]


def _sample(leaf: mx.array) -> mx.array:
    flat = leaf.reshape(-1)
    return flat[:: max(1, leaf.size // SAMPLED)].view(mx.uint8)
