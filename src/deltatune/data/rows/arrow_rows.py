"""Gives the rows of an Arrow table the keys that they were written with.

Arrow stores nested objects in columns: every object of a column gets the keys of all of them, and null under those that
it did not have. A row written as JSON must give the same tokens before and after, so these keys are left out again.
"""

from __future__ import annotations

from typing import Any

_KINDS = ("image", "video")
_COLUMNS = ("image", "images", "video", "videos")


def as_written(row: dict[str, Any], features: Any) -> dict[str, Any]:
    """Return a row of the datasets library without the nulls in its nested objects.

    A null in the source looks the same as one added by Arrow, and goes too. Members of a list stay, since Arrow adds
    none. Values stored as JSON keep their nulls. `features` is the library's description of the columns, if it has one.
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


def may_hold_media(table: Any) -> bool:
    """Return whether a row of a pyarrow table may hold an image or a video, in a column of its own or in a message."""
    return any(
        _any_value(column) if name in _COLUMNS else _any_part(column.combine_chunks())
        for name, column in zip(table.column_names, table.columns, strict=True)
    )


def _any_value(column: Any) -> bool:
    """Return whether a column holds something other than nulls and empty lists."""
    import pyarrow.compute as compute
    from pyarrow import types

    if _is_list(column.type):
        return bool(compute.any(compute.greater(compute.list_value_length(column), 0)).as_py())
    return not types.is_null(column.type) and column.null_count < len(column)


def _any_part(array: Any) -> bool:
    """Return whether a text within an array is the type of a part with an image or video, or JSON that may hold one."""
    import pyarrow
    import pyarrow.compute as compute
    from pyarrow import types

    if isinstance(array.type, pyarrow.BaseExtensionType):
        return _any_part(array.storage)
    if types.is_dictionary(array.type):
        return _any_part(array.dictionary)
    if types.is_struct(array.type):
        return any(_any_part(field) for field in array.flatten())
    if _is_list(array.type):
        return _any_part(array.flatten())
    if not (types.is_string(array.type) or types.is_large_string(array.type)):
        return False
    return any(
        compute.any(matches).as_py()
        for kind in _KINDS
        for matches in (compute.starts_with(array, kind), compute.match_substring(array, f'"{kind}'))
    )


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
