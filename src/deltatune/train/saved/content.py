"""Computes digests of the model that a run starts from, which a continued run must share.

The digests depend on the content alone, so that a model may be moved or renamed between a run and its continuation.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import xxhash

from ...machine.host_memory import as_numpy
from ...options.config import TrainConfig
from ..by_layer.store import Store
from ..distillation.teacher import teacher_of
from ..tree import leaves

# The keys of config.json that say who wrote it, and change nothing that is computed.
_INCIDENTAL = ("_name_or_path", "transformers_version")


def facts(
    model: nn.Module,
    config: TrainConfig,
    model_config: dict[str, Any] | None,
    weights: Store | None = None,
    of_teacher: Store | None = None,
) -> dict[str, str | None]:
    """Return the facts of state.fingerprint beside the options: digests of the model and of adapters.

    `weights` reads those of the model's arrays that stay on the disk, and `of_teacher` those of its teacher's.
    """
    adapter = config.resume_adapter_file
    teacher = teacher_of(config) if config.loss == "distill" else None
    return {
        "model_tensors": structure(model),
        "model_config": None if model_config is None else config_digest(model_config),
        "model_content": weights_digest(model, config, weights),
        "adapter_weights": None if adapter is None else file_digest(adapter),
        "teacher_content": None if teacher is None else weights_digest(teacher, TrainConfig(), of_teacher),
    }


def structure(model: nn.Module) -> str:
    """Return a digest of every parameter's name, shape and dtype, and of which parameters are trainable."""
    trains = {name for name, _ in leaves(model.trainable_parameters())}
    digest = hashlib.sha256()
    for name, leaf in sorted(leaves(model.parameters())):
        digest.update(f"{name} {leaf.shape} {leaf.dtype} {name in trains}\n".encode())
    return digest.hexdigest()[:16]


def config_digest(model_config: dict[str, Any]) -> str:
    """Return a digest of the content of a config.json, such as the base of its rotary positions."""
    content = {key: value for key, value in model_config.items() if key not in _INCIDENTAL}
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, default=str).encode())


def weights_digest(model: nn.Module, config: TrainConfig, weights: Store | None = None) -> str:
    """Return a digest of all numbers of the checkpoint; it takes about the time of reading them from memory.

    Randomly initialised tensors are left out, since another device may round them differently: adapters, and all of a
    model that trains from scratch. The seed, one of the options that a continuation must share, determines those.
    """
    drawn = set() if config.fine_tune_type == "full" else {name for name, _ in leaves(model.trainable_parameters())}
    loaded = [(name, leaf) for name, leaf in sorted(leaves(model.parameters())) if name not in drawn]
    digest = xxhash.xxh3_128()
    for name, leaf in [] if config.from_scratch else loaded:
        digest.update(name.encode())
        array = leaf if weights is None else weights.numbers(name, leaf)
        numbers: Any = as_numpy(array.reshape(-1).view(mx.uint8))
        digest.update(numbers)
    return digest.hexdigest()


def file_digest(path: str | Path) -> str:
    """Return a digest of the file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:16]
