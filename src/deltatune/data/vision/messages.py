"""Where images and videos stand in the messages of a row, and which file stands at each place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import UserError
from .videos import Video

IMAGE, VIDEO = "image", "video"
_KINDS = {IMAGE: IMAGE, "image_url": IMAGE, VIDEO: VIDEO, "video_url": VIDEO}
_FPS = "fps"

Messages = list[dict[str, Any]]


def seen_in(row: Any, chat: str = "messages") -> str | None:
    """ "image" or "video", where a row brings one in a column of its own or inside a message, or None."""
    if not isinstance(row, Mapping):
        return None
    for kind in (IMAGE, VIDEO):
        if row.get(f"{kind}s") or row.get(kind) is not None:
            return kind
    messages = row.get(chat)
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, Mapping) and part.get("type") in _KINDS:
                return _KINDS[part["type"]]
    return None


def listed(row: Mapping[str, Any], source: str) -> dict[str, list[Any]]:
    """The images and videos of the row's own columns, by kind."""
    return {kind: _listed(row, kind, source) for kind in (IMAGE, VIDEO)}


def placed(messages: Messages, columns: dict[str, list[Any]], source: str) -> tuple[Messages, list[Any]]:
    """The messages with a part for each image and video, and what stands at them, in order: a Video is one.

    Places are parts, or "<image>" and "<video>" in a text; what stands there comes from the parts themselves
    ({"type": "image", "image": PATH}), or in order from the row's columns. Where no place is given, images and then
    videos stand before the first user message.
    """
    found: Messages = []
    inside: list[tuple[str, Any]] = []
    for number, message in enumerate(messages, 1):
        content, named = _parts(message.get("content"), f"{source}: message {number}")
        found.append({**message, "content": content})
        inside += named
    # Each goes before what is there, so the last kind comes first.
    for kind in (VIDEO, IMAGE):
        if columns[kind] and kind not in [each for each, _ in inside]:
            _put_first(found, kind, len(columns[kind]), source)
            inside += [(kind, None)] * len(columns[kind])
    supplies = {kind: _supply(kind, inside, columns[kind], source) for kind in (IMAGE, VIDEO)}
    contents = [message["content"] for message in found if isinstance(message["content"], list)]
    order = [part["type"] for content in contents for part in content if part["type"] in supplies]
    return found, [next(supplies[kind]) for kind in order]


def _supply(kind: str, inside: list[tuple[str, Any]], column: list[Any], source: str) -> Iterator[Any]:
    """What stands at the places of a kind, in order."""
    slots = [value for each, value in inside if each == kind]
    own = [value for value in slots if value is not None]
    if (own and len(own) < len(slots)) or (own and column):
        raise UserError(f"{source}: {kind}s in the messages and in '{kind}s'; give all of them in one place.")
    if own:
        return iter(own)
    if len(slots) > len(column):
        raise UserError(f"{source}: {len(slots)} {kind} placeholders, and {len(column)} {kind}s; give one for each.")
    if len(slots) < len(column):
        raise UserError(f"{source}: {len(column)} {kind}s, and {len(slots)} placeholders; mark a place for each.")
    return iter(column)


def _listed(row: Mapping[str, Any], kind: str, source: str) -> list[Any]:
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
    """Content as the template takes it, and each image's or video's kind and file (None: a column has it)."""
    if isinstance(content, str):
        parts = _marked(content)
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


def _marked(text: str) -> list[dict[str, Any]]:
    """A text in parts, split at its placeholders."""
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


def _fps(given: Mapping[str, Any], where: str) -> float | None:
    value = given.get(_FPS)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"{where}: 'fps': expected a number of frames a second above 0, got {value!r}.")
    return float(value)


def _put_first(messages: Messages, kind: str, count: int, source: str) -> None:
    for message in messages:
        if message["role"] == "user":
            content = message["content"]
            text = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
            message["content"] = [{"type": kind}] * count + text
            return
    raise UserError(f"{source}: {count} {kind}s, and no user message to hold them.")
