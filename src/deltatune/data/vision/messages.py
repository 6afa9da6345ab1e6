"""Finds the places of images and videos in the messages of a row, and the file that belongs to each place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import UserError
from ..rows.row_formats import Messages, json_text
from ..rows.unread_columns import TEXT_KEYS, is_absent, refuse_unknown_keys, text_of
from .images import SIZE_OPTIONS, SizedImage, size_options
from .videos import Video

IMAGE = "image"
VIDEO = "video"
_KINDS = {IMAGE: IMAGE, "image_url": IMAGE, VIDEO: VIDEO, "video_url": VIDEO}
_FPS = "fps"
_BASE64 = "base64"
# The keys under which a part holds its image or video: those of Qwen, OpenAI and transformers.
_HOLDERS = {
    IMAGE: (IMAGE, "image_url", "url", "path", _BASE64),
    VIDEO: (VIDEO, "video_url", "url", "path"),
}
_MARKS = re.compile("(<image>|<video>)")


def media_kind(row: Any, messages: Iterable[Any]) -> str | None:
    """Return "image" or "video" if a row has one, in a column of its own or inside one of its messages, else None."""
    if not isinstance(row, Mapping):
        return None
    for kind in (IMAGE, VIDEO):
        # A cell of a CSV file holds a list as JSON.
        if row.get(f"{kind}s") not in (None, "", [], (), "[]") or row.get(kind) is not None:
            return kind
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, Mapping) and part.get("type") in _KINDS:
                return _KINDS[part["type"]]
    return None


def place_media(messages: Messages, row: Mapping[str, Any], source: str) -> tuple[Messages, list[tuple[int, Any]]]:
    """Return the messages of a row with a part for each image and video; and of these parts, in order, the number of
    the message and the value.

    A place is a part, or a mark, "<image>" or "<video>", in the text of a user. Its value comes from the part itself
    ({"type": "image", "image": PATH}), or in order from the row's columns. Without places, the images and then the
    videos go to the start of the first user message. A mark for which no image or video is left is text. A UserError
    says that the places and the values do not match.
    """
    columns = {kind: _column(row, kind, source) for kind in (IMAGE, VIDEO)}
    with_parts: Messages = []
    places: list[tuple[str, Any]] = []
    for number, message in enumerate(messages, 1):
        content, named = _parts(message.get("content"), f"{source}: message {number}")
        with_parts.append({**message, "content": content})
        places += named
    unplaced = Counter({kind: len(columns[kind]) for kind in columns}) - Counter(kind for kind, _ in places)
    for message in with_parts:
        if message["role"] == "user" and isinstance(message["content"], str):
            message["content"], marked = _split_at_marks(message["content"], unplaced)
            places += [(kind, None) for kind in marked]
    # Each kind goes to the start of the message, so the images, handled second, come first in it.
    for kind in (VIDEO, IMAGE):
        if columns[kind] and kind not in [other for other, _ in places]:
            _put_first(with_parts, kind, len(columns[kind]), source)
            places += [(kind, None)] * len(columns[kind])
    values = {kind: _values(kind, places, columns[kind], source) for kind in (IMAGE, VIDEO)}
    kinds = [
        (number, part["type"])
        for number, message in enumerate(with_parts)
        if isinstance(message["content"], list)
        for part in message["content"]
    ]
    return with_parts, [(number, next(values[kind])) for number, kind in kinds if kind in values]


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
    several = f"{kind}s"
    if row.get(several) is not None and row.get(kind) is not None:
        raise UserError(f"{source}: both {kind!r} and {several!r}; give one of them.")
    # A cell of a CSV file holds a list as JSON.
    values = json_text(row.get(several), f"{source}: {several!r}")
    if values is None:
        value = row.get(kind)
        # A list is several images, or the frames of one video, or several such videos.
        are_several = isinstance(value, list) and (kind == IMAGE or all(isinstance(frames, list) for frames in value))
        one = [] if value is None else [value]
        values = value if are_several else one
    if not isinstance(values, list | tuple):
        raise UserError(f"{source}: {several!r}: expected a list of paths, got {type(values).__name__}.")
    if kind == IMAGE:
        return list(values)
    return [Video(value, _fps(row, source)) for value in values]


def _parts(content: Any, where: str) -> tuple[Any, list[tuple[str, Any]]]:
    """Return the content as a template takes it, and the kind and value of each part that is no text.

    The value of a part is None if a column holds it.
    """
    if not isinstance(content, list):
        return content, []
    parts, named = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            refuse_unknown_keys(part, TEXT_KEYS, f"{where}: a part with text")
            parts.append({"type": "text", "text": part["text"]})
        elif kind in _KINDS:
            named.append((_KINDS[kind], _value(part, _KINDS[kind], f"{where}: a part with {_KINDS[kind]}")))
            parts.append({"type": _KINDS[kind]})
        else:
            raise UserError(
                f'{where}: expected parts {{"type": "text", "image" or "video", ...}}, got {str(part)[:60]}.'
            )
    if not named:
        return "".join(part["text"] for part in parts), []
    return parts, named


def _value(part: Mapping[str, Any], kind: str, where: str) -> Any:
    """Return the image or video that a part names; None if a column holds it."""
    options = SIZE_OPTIONS if kind == IMAGE else (_FPS,)
    refuse_unknown_keys(part, ("type", *_HOLDERS[kind], *options), where)
    names = [name for name in _HOLDERS[kind] if not is_absent(part.get(name))]
    if len(names) > 1:
        raise UserError(f"{where}: both {names[0]!r} and {names[1]!r}; give one of them.")
    sizes = size_options(part, where) if kind == IMAGE else {}
    if not names:
        if sizes:
            raise UserError(f"{where}: {next(iter(sizes))!r} belongs to a part that names its image; name it there.")
        return None
    value = part[names[0]]
    if isinstance(value, Mapping) and names[0].endswith("_url"):
        # OpenAI's programs write the detail that they choose by default.
        read = {key: value[key] for key in value if (key, value[key]) != ("detail", "auto")}
        refuse_unknown_keys(read, ("url",), f"{where}: {names[0]!r}")
        value = value.get("url")
    if names[0] == _BASE64 and isinstance(value, str) and not value.startswith("data:"):
        value = f"data:;base64,{value}"
    if kind == VIDEO:
        return Video(value, _fps(part, where))
    return SizedImage(value, sizes) if sizes else value


def _split_at_marks(text: str, unplaced: Counter[str]) -> tuple[Any, list[str]]:
    """Split a text into parts at the marks for which an image or video is left, and take these from `unplaced`.

    Returned are the parts, or the text itself where it has no such mark, and the kinds of the places, in order.
    """
    parts: list[dict[str, Any]] = []
    marked: list[str] = []
    written = ""
    for piece in _MARKS.split(text):
        kind = piece[1:-1] if _MARKS.fullmatch(piece) else None
        if kind is None or unplaced[kind] < 1:
            written += piece
            continue
        unplaced[kind] -= 1
        parts += [{"type": "text", "text": written}] * bool(written) + [{"type": kind}]
        marked.append(kind)
        written = ""
    parts += [{"type": "text", "text": written}] * bool(written)
    return (parts if marked else text), marked


def has_mark_in_text(messages: Messages) -> bool:
    """Whether a user's text still holds a mark, of the messages that place_media returns."""
    return any(_MARKS.search(text_of(message["content"])) for message in messages if message["role"] == "user")


def _fps(holder: Mapping[str, Any], where: str) -> float | None:
    value = holder.get(_FPS)
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
    raise UserError(f"{source}: {count} {kind}s, and no user message to hold them; add one.")
