"""Gives the rows of an Arrow table the keys that they were written with.

Arrow stores nested objects in columns: every object of a column gets the keys of all of them, and null under those that
it did not have. A row written as JSON must give the same tokens before and after, so these keys are left out again.
"""

from __future__ import annotations

from typing import Any


def as_written(row: dict[str, Any], features: Any) -> dict[str, Any]:
    """Return a row without the nulls in its nested objects.

    A null that somebody wrote looks the same as one that Arrow added, and goes too. Members of a list stay, since Arrow
    adds none. Values that are stored as JSON hold what was written.

    Args:
        row: a row as the datasets library gives it.
        features: the library's description of the columns, or None where it has none.
    """
    return {key: _value(value, _ANY if features is None else features.get(key)) for key, value in row.items()}


# Stands for the description of a column that has none.
_ANY: Any = object()


def _value(value: Any, feature: Any) -> Any:
    if isinstance(value, dict) and (feature is _ANY or isinstance(feature, dict)):
        return {
            key: _value(part, _ANY if feature is _ANY else feature.get(key))
            for key, part in value.items()
            if part is not None
        }
    if isinstance(value, list):
        member = feature if feature is _ANY else _member(feature)
        return value if member is None else [_value(part, member) for part in value]
    return value


def _member(feature: Any) -> Any:
    """Return the description of a list's members if they can hold objects, else None."""
    # The datasets library describes a list by a class of its own or, in older versions, by a list of one member.
    member = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return member if isinstance(member, dict | list) or hasattr(member, "feature") else None
