"""Reads the JSON files beside a model or an adapter, and checks the types of their fields (json_fields.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..options.values import short
from .json_fields import FIELDS, FieldKind, Fields


def read_json(path: Path, name: str | None = None) -> dict[str, Any]:
    """Read a JSON object with the fields that FIELDS lists under `name`, by default the file's; may raise UserError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(content).__name__}.")
    check_fields(content, FIELDS.get(name or path.name, {}), str(path))
    return content


def check_fields(content: dict[str, Any], fields: Fields, where: str) -> None:
    """Check the types of the fields of an object that a table lists; UserError, which begins with `where`."""
    for name, kind in fields.items():
        value = content.get(name)
        if name not in content or (value is None and (not isinstance(kind, FieldKind) or kind.null)):
            continue
        if isinstance(kind, FieldKind):
            if not kind.fits(value):
                _refuse(where, name, kind.words, value)
        elif isinstance(value, dict):
            check_fields(value, kind, f"{where}: {name}")
        else:
            _refuse(where, name, "an object", value)


def _refuse(where: str, name: str, expected: str, value: Any) -> None:
    raise UserError(
        f"{where}: {name}: expected {expected}, got {short(value)}. Correct it, or take the file of the original."
    )
