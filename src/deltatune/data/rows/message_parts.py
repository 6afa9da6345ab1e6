"""Refuses keys of a message's part, or of an image's description, that are not read: they would be lost silently."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...errors import UserError
from ...options.values import nearest

TEXT_KEYS = ("type", "text")


def is_absent(value: Any) -> bool:
    """Whether a value is none: null, or an empty text, list or object, as programs write for keys that they leave."""
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def refuse_unknown_keys(part: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse a part with a key that is not read.

    Args:
        part: The part of a message, or the object that describes an image.
        known: The keys that are read.
        where: The part's name in messages.

    Raises:
        UserError: There is another key, and its value is not empty.
    """
    for key in part:
        if key not in known and not is_absent(part[key]):
            raise UserError(
                f"{where}: unknown key {str(key)[:60]!r}{nearest(str(key), list(known))}: it is not read; expected "
                f"{', '.join(known)}. Remove it."
            )
