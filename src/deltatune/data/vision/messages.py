"""Finds the places of images and videos in the messages of a row, and the file that belongs to each place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import UserError
from .videos import Video

IMAGE, VIDEO = "image", "video"
_KINDS = {IMAGE: IMAGE, "image_url": IMAGE, VIDEO: VIDEO, "video_url": VIDEO}
_FPS = "fps"

Messages = list[dict[str, Any]]


def media_kind(row: Any, messages: Iterable[Any]) -> str | None:
    """Return "image" or "video" if a row has one, in a column of its own or inside one of its messages, else None."""
    if not isinstance(row, Mapping):
        return None
    for kind in (IMAGE, VIDEO):
        if row.get(f"{kind}s") or row.get(kind) is not None:
            return kind
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, Mapping) and part.get("type") in _KINDS:
                return _KINDS[part["type"]]
    return None


def media_columns(row: Mapping[str, Any], source: str) -> dict[str, list[Any]]:
    """Return the images and the videos in the row's own columns, by kind."""
    return {kind: _column(row, kind, source) for kind in (IMAGE, VIDEO)}


def place_media(messages: Messages, columns: dict[str, list[Any]], source: str) -> tuple[Messages, list[Any]]:
    """Give each image and video of a row its place in the messages.

    A place is a part, or "<image>" or "<video>" in a text. Its value comes from the part itself ({"type": "image",
    "image": PATH}), or in order from the row's columns. Without places, the images and then the videos go to the start
    of the first user message.

    Args:
        messages: the row's messages.
        columns: the images and videos of the row's columns, by kind.
        source: where the row came from, for messages to the user.

    Returns:
        The messages with a part for each image and video, and the values of these parts in order.

    Raises:
        UserError: the places and the values do not match.
    """
    with_parts: Messages = []
    places: list[tuple[str, Any]] = []
    for number, message in enumerate(messages, 1):
        content, named = _parts(message.get("content"), f"{source}: message {number}")
        with_parts.append({**message, "content": content})
        places += named
    # Each kind goes to the start of the message, so the images, handled second, come first in it.
    for kind in (VIDEO, IMAGE):
        if columns[kind] and kind not in [other for other, _ in places]:
            _put_first(with_parts, kind, len(columns[kind]), source)
            places += [(kind, None)] * len(columns[kind])
    values = {kind: _values(kind, places, columns[kind], source) for kind in (IMAGE, VIDEO)}
    contents = [message["content"] for message in with_parts if isinstance(message["content"], list)]
    order = [part["type"] for content in contents for part in content if part["type"] in values]
    return with_parts, [next(values[kind]) for kind in order]


def write_videos(messages: Messages, texts: Iterable[str]) -> Messages:
    """Return the messages of place_media with each video replaced by its text, which holds its times and tokens."""
    following = iter(texts)
    written = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [{"type": "text", "text": next(following)} if part["type"] == VIDEO else part for part in content]
        written.append({**message, "content": content})
    return written


def _values(kind: str, places: list[tuple[str, Any]], column: list[Any], source: str) -> Iterator[Any]:
    """Return the values of the places of one kind, in order."""
    slots = [value for other, value in places if other == kind]
    in_messages = [value for value in slots if value is not None]
    if (in_messages and len(in_messages) < len(slots)) or (in_messages and column):
        raise UserError(f"{source}: {kind}s in the messages and in '{kind}s'; give all of them in one place.")
    if in_messages:
        return iter(in_messages)
    expected = f"expected as many {kind}s as places in the text, got {len(column)} and {len(slots)}"
    if len(slots) > len(column):
        raise UserError(f"{source}: {expected}; give one for each place.")
    if len(slots) < len(column):
        raise UserError(f"{source}: {expected}; mark a place for each.")
    return iter(column)


def _column(row: Mapping[str, Any], kind: str, source: str) -> list[Any]:
    """Return the images or videos in the row's own column, such as "images" or "image"."""
    several = f"{kind}s"
    if row.get(several) is not None and row.get(kind) is not None:
        raise UserError(f"{source}: both {kind!r} and {several!r}; give one of them.")
    values = row.get(several)
    if values is None:
        values = [] if row.get(kind) is None else [row[kind]]
    if not isinstance(values, list | tuple):
        raise UserError(f"{source}: {several!r}: expected a list of paths, got {type(values).__name__}.")
    if kind == IMAGE:
        return list(values)
    return [Video(value, _fps(row, source)) for value in values]


def _parts(content: Any, where: str) -> tuple[Any, list[tuple[str, Any]]]:
    """Return the content as a template takes it, and the kind and value of each place (None if a column holds it)."""
    if isinstance(content, str):
        parts = _split_at_placeholders(content)
        named: list[tuple[str, Any]] = [(part["type"], None) for part in parts if part["type"] != "text"]
        return (parts, named) if named else (content, [])
    if not isinstance(content, list):
        return content, []
    parts, named = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in _KINDS:
            value = part.get(kind) if part.get(kind) is not None else part.get("path")
            value = value.get("url") if kind.endswith("_url") and isinstance(value, Mapping) else value
            if _KINDS[kind] == VIDEO and value is not None:
                value = Video(value, _fps(part, where))
            named.append((_KINDS[kind], value))
            parts.append({"type": _KINDS[kind]})
        else:
            raise UserError(
                f'{where}: expected parts {{"type": "text", "image" or "video", ...}}, got {str(part)[:60]}.'
            )
    if not named:
        return "".join(part["text"] for part in parts), []
    return parts, named


def _split_at_placeholders(text: str) -> list[dict[str, Any]]:
    """Split a text into parts at "<image>" and "<video>"."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for kind in (IMAGE, VIDEO):
        split: list[dict[str, Any]] = []
        for part in parts:
            for index, piece in enumerate(part["text"].split(f"<{kind}>") if part["type"] == "text" else []):
                split += [{"type": kind}] if index else []
                split += [{"type": "text", "text": piece}] if piece else []
            split += [part] if part["type"] != "text" else []
        parts = split
    return parts


def _fps(holder: Mapping[str, Any], where: str) -> float | None:
    """Return the frames per second that a row or a part gives, or None."""
    value = holder.get(_FPS)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"{where}: 'fps': expected a number of frames a second above 0, got {value!r}.")
    return float(value)


def _put_first(messages: Messages, kind: str, count: int, source: str) -> None:
    """Put places for images or videos at the start of the first user message."""
    for message in messages:
        if message["role"] == "user":
            content = message["content"]
            text = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
            message["content"] = [{"type": kind}] * count + text
            return
    raise UserError(f"{source}: {count} {kind}s, and no user message to hold them; add one.")
