"""The parts of a model with images: its language layers, its vision tower, and the projector between them."""

from __future__ import annotations

import mlx.nn as nn

from ..errors import UserError

PARTS = ("language", "vision", "projector")
_TOWER = "vision_tower"
_PROJECTORS = ("merger", "projector", "aligner", "connector")


def check_parts(model: nn.Module, parts: list[str]) -> None:
    """Raise UserError unless `parts` names one or more parts that the model has."""
    for part in parts:
        if part not in PARTS:
            raise UserError(f"parts: {part!r} is not known; expected any of {', '.join(PARTS)}.")
    if not parts:
        raise UserError(f"parts: expected at least one of {', '.join(PARTS)}.")
    if set(parts) - {"language"} and not isinstance(model.get(_TOWER), nn.Module):
        raise UserError(
            f"parts: {', '.join(parts)}: this model was loaded without a vision tower, which is loaded only when the "
            "data has images."
        )


def part_of(path: str) -> str | None:
    """Return "vision" or "projector" for the path of a module of either part, and None for any other module."""
    steps = path.split(".")
    if steps[0] == "language_model":
        return None
    if any(word in step for step in steps for word in _PROJECTORS):
        return "projector"
    return "vision" if steps[0] == _TOWER else None
