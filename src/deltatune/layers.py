"""Finds gated-delta layers by their parameters and the code that computes them, never by the model's name."""

from __future__ import annotations

import sys

import mlx.nn as nn

# The function of mlx-lm and mlx-vlm that computes the gated delta rule.
ENTRY_POINT = "gated_delta_update"


def holds_entry_point(cls: type) -> bool:
    """Whether the Python module of a class, or of one of its bases, has a global named gated_delta_update."""
    return any(ENTRY_POINT in vars(module) for base in cls.__mro__ if (module := sys.modules.get(base.__module__)))


def is_gated_delta(module: nn.Module) -> bool:
    """Whether a module is a gated-delta mixer.

    It holds the parameters A_log and dt_bias, as Mamba's mixers do too, and calls gated_delta_update, as those do not.
    """
    return "A_log" in module and "dt_bias" in module and holds_entry_point(type(module))


def gated_delta_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return every gated-delta mixer in `model`, by its path."""
    return {path: module for path, module in model.named_modules() if is_gated_delta(module)}
