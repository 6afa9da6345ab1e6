"""Finds gated-delta layers by what they are, never by model_type."""

from __future__ import annotations

import sys

import mlx.nn as nn

ENTRY_POINT = "gated_delta_update"


def holds_entry_point(cls: type) -> bool:
    """Whether the module of `cls`, or of a base of it, has a global named gated_delta_update."""
    return any(ENTRY_POINT in vars(module) for base in cls.__mro__ if (module := sys.modules.get(base.__module__)))


def is_gated_delta(module: nn.Module) -> bool:
    """A_log and dt_bias on a class whose module holds gated_delta_update: Mamba mixers have the first two only."""
    return "A_log" in module and "dt_bias" in module and holds_entry_point(type(module))


def gated_delta_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> gated-delta mixer, for every one in `model`."""
    return {path: module for path, module in model.named_modules() if is_gated_delta(module)}
