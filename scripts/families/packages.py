"""The packages whose models are tried, and how a model of each is listed, made and loaded."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import configurations
import mlx.core as mx
import mlx.nn as nn
import mlx_vlm_types

from deltatune.models.load import load_model, load_vision_model, new_model


@dataclass(frozen=True)
class Package:
    """A package of models: its types, the config.json of a tiny model of one, and how to make and to load it."""

    name: str
    types: Callable[[], list[str]]
    config_of: Callable[[str], dict[str, Any]]
    new: Callable[[dict[str, Any]], nn.Module]
    load: Callable[[Path], tuple[nn.Module, dict[str, Any]]]


def _load_vlm(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    config = json.loads((folder / "config.json").read_text())
    return load_vision_model(folder, config, lazy=False), config


MLX_LM = Package(
    "mlx-lm",
    configurations.types,
    configurations.config_of,
    lambda config: new_model(copy.deepcopy(config), seed=0),
    load_model,
)
MLX_VLM = Package(
    "mlx-vlm",
    mlx_vlm_types.types,
    mlx_vlm_types.config_of_vlm,
    lambda config: new_model(copy.deepcopy(config), vision=True),
    _load_vlm,
)
PACKAGES = (MLX_LM, MLX_VLM)


def package_of(kind: str) -> Package:
    """Return the package of a type, which has a prefix where it is not mlx-lm's."""
    return MLX_VLM if kind.startswith(mlx_vlm_types.PREFIX) else MLX_LM


def logits_of(model: nn.Module, rows: mx.array) -> mx.array:
    """Return the logits of rows of text; models of mlx-vlm may ask for pictures, and None says that there are none."""
    parameters = list(inspect.signature(type(model).__call__).parameters.values())[2:]
    none = {one.name: None for one in parameters if one.default is one.empty and one.kind == one.POSITIONAL_OR_KEYWORD}
    output = model(rows, **none)
    return output if isinstance(output, mx.array) else output.logits
