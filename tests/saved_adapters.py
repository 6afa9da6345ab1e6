"""Adapters of random numbers on the models of tiny checkpoints."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from deltatune.lora import convert_to_lora, save_adapters
from deltatune.lora.new_rows import add_rows
from deltatune.models.load import load_model
from deltatune.models.vocabulary import token_tables
from deltatune.options.config import LoraConfig


def moved(model: nn.Module, size: float = 0.03, seed: int | None = None) -> nn.Module:
    """Change the trainable parameters of a model by random numbers of this size."""
    if seed is not None:
        mx.random.seed(seed)
    model.update(tree_map(lambda array: array + size * mx.random.normal(array.shape), model.trainable_parameters()))
    return model


def adapted(base: Path, folder: Path | None = None, kind: str = "lora", rows: int = 0, **options: Any) -> nn.Module:
    """Load a checkpoint's model with a random adapter, or with changed weights for the kind "full".

    `folder` is where that is saved, with so many rows for new tokens. The options are those of LoraConfig.
    """
    model, _ = load_model(base)
    add_rows(model, dict.fromkeys(token_tables(model), rows) if rows else {})
    convert_to_lora(model, LoraConfig(**{"rank": 4, "scale": 2.0} | options), fine_tune_type=kind)
    moved(model, seed=7)
    if folder is not None:
        save_adapters(model, folder, {"model": str(base)})
    return model
