"""Reads the JSON files beside a model or an adapter, and checks the types of their fields (json_fields.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..options.values import short
from .json_fields import FIELDS, FieldKind, Fields


def read_json(path: Path, name: str | None = None) -> dict[str, Any]:
    """Read a JSON object from a file, and check the types of its fields.

    Args:
        path: The file.
        name: The entry of FIELDS that lists its fields; by default the name of the file.

    Raises:
        UserError: The file is unreadable, not JSON, or holds another kind of value than libraries expect.
    """
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
    """Check the fields of an object for their types.

    Args:
        content: The object. Fields that the table does not list are not looked at.
        fields: For each field its kind, or the table of the object that it holds.
        where: The file and the path of the object in it, with which messages begin.

    Raises:
        UserError: A field holds another kind of value.
    """
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
