"""The options of tiny models, as config.json has them in tiny_models.yaml, and noise for their random weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import yaml
from mlx.utils import tree_map

_MODELS = yaml.safe_load((Path(__file__).parent / "tiny_models.yaml").read_text(encoding="utf-8"))
PARTS: dict[str, dict[str, Any]] = _MODELS["parts"]
#: Small options that any family with attention takes.
PLAIN = PARTS["plain"]
VOCABULARY: int = PLAIN["vocab_size"]
# The families that deltatune trains with patches, and families that it must not take for gated-delta ones.
FAMILIES: dict[str, dict[str, Any]] = _MODELS["families"]
OTHERS: dict[str, dict[str, Any]] = _MODELS["others"]
LINEAR_ATTENTION: dict[str, dict[str, Any]] = _MODELS["linear_attention"]
# Families whose text options stand under `text_config`, as in their released checkpoints.
NESTED = {"qwen3_5", "qwen3_5_moe", "kimi_k3"}


def weekly_but(names: Iterable[str], *daily: str) -> list[Any]:
    """Values of a parameter: `daily` ones run in every suite, and all other names every week."""
    return [name if name in daily else pytest.param(name, marks=pytest.mark.weekly) for name in names]


def with_noise(model: nn.Module) -> nn.Module:
    """Add noise to the tensors of `model` that start constant (norms, biases, gates), so that no gradient hides."""

    def vary(array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating) or (array.size > 1 and (array.max() != array.min()).item()):
            return array
        return array + 0.1 * mx.random.normal(array.shape).astype(array.dtype)

    model.update(tree_map(vary, model.parameters()))
    mx.eval(model.parameters())
    return model
