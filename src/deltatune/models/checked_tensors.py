"""Compares the tensors of a checkpoint with its model's parameters, while mlx-lm or mlx-vlm loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError, reason
from ..ops.experts import single_rows
from ..ops.functional import arrays_of, is_floating
from ..patches.tables.sorted_rows import without_gaps
from .transformers_configs import with_joined_experts, with_released_names

# How many tensors a message names before it counts the rest.
_NAMED_TENSORS = 4


def checked(model_class: type, path: Path) -> type:
    """A subclass of `model_class` that compares every tensor before loading, and names those missed by `sanitize`."""

    def load_weights(self: nn.Module, weights: list[tuple[str, mx.array]], strict: bool = True) -> nn.Module:
        _compare(path, dict(weights), arrays_of(self.parameters()))
        if single_rows.needs_whole_matrices():
            weights = without_gaps(weights)
        return model_class.load_weights(self, weights, strict=strict)  # type: ignore[attr-defined]

    def sanitize(self: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        try:
            return with_joined_experts(model_class.sanitize(self, with_released_names(weights)))  # type: ignore[attr-defined]
        except KeyError as error:
            raise UserError(f"model {path}: tensor {error} is missing.") from error
        except (ValueError, IndexError) as error:
            raise UserError(f"model {path}: its tensors do not fit its config.json: {reason(error)}") from error

    body: dict[str, Any] = {"load_weights": load_weights}
    if hasattr(model_class, "sanitize"):
        body["sanitize"] = sanitize
    return type(model_class.__name__, (model_class,), body)


def _compare(path: Path, stored: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    """UserError that names every tensor which is missing, not expected, of another shape, or of integers."""
    missing = [name for name in expected if name not in stored]
    extra = [name for name in stored if name not in expected]
    pairs = [(name, stored[name], expected[name]) for name in expected if name in stored]
    shapes = [
        f"{name} has shape {new.shape}, {old.shape} expected" for name, new, old in pairs if new.shape != old.shape
    ]
    integers = [
        f"{name} has type {str(new.dtype).removeprefix('mlx.core.')}"
        for name, new, old in pairs
        if is_floating(old) and not is_floating(new)
    ]
    kinds = {
        "missing": missing,
        "unknown to the model": extra,
        "misshapen": shapes,
        "not of a floating-point type": integers,
    }
    problems = [f"{len(names)} {problem} ({_first_names(names)})" for problem, names in kinds.items() if names]
    if not problems:
        return
    hint = ""
    if any(name.endswith(".scales") for name in extra):
        hint = " The weights are quantised, but config.json has no `quantization` for them."
    elif any(name.endswith(".scales") for name in missing):
        hint = " config.json says that the weights are quantised, but they are not."
    elif integers:
        hint = " Another tool quantised the weights, or they are damaged: take the original checkpoint."
    raise UserError(f"model {path}: the tensors do not fit config.json: {'; '.join(problems)}.{hint}")


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_TENSORS:,} more" if len(names) > _NAMED_TENSORS else ""
    return ", ".join(names[:_NAMED_TENSORS]) + more
