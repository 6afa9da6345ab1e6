"""Rows with images to examples: placeholders found, expanded to as many tokens as the image has, and masked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import UserError
from ..models.vision_inputs import VisionSpec, token_positions
from .example import Example
from .images import ImageReader
from .pictures import Pictures
from .text import TextEncoder

PLACEHOLDER = "<image>"
IMAGES, IMAGE = "images", "image"
_VIDEO = ("video", "videos", "video_url")


def has_image(row: Any, chat: str = "messages") -> bool:
    """Whether a row brings an image, in a column of its own or inside a message."""
    if not isinstance(row, Mapping):
        return False
    if row.get(IMAGES) or row.get(IMAGE) is not None:
        return True
    messages = row.get(chat)
    parts = [
        part
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    return any(isinstance(part, Mapping) and part.get("type") in (IMAGE, "image_url") for part in parts)


class VisionEncoder:
    """Turns rows of text and images into examples; what counts in the loss is TextEncoder's to say.

    A message's content is a string, with "<image>" where an image stands, or a list of {"type": "text", "text": ...}
    and {"type": "image"} parts; images come from the parts themselves ("image": PATH), or in order from the row's
    "images" (or "image"). Where no place is given they stand before the first user message.
    """

    def __init__(self, text: TextEncoder, spec: VisionSpec, reader: ImageReader):
        self._text, self._spec, self._reader = text, spec, reader

    @property
    def kinds(self) -> set[str]:
        """Which formats were seen."""
        return self._text.kinds

    def __call__(self, row: Any, source: str) -> Example:
        """The row's example, at full length. UserError, with `source`, where the row cannot be trained on."""
        if not isinstance(row, Mapping):
            return self._text(row, source)
        row = _video_refused(dict(row), source)
        values = _listed(row, source)
        chat = self._text.conversation(row, source)
        if chat is None:
            if values:
                raise UserError(f"{source}: a text line has no place for an image; use messages or prompt/completion.")
            return self._with_pictures(self._text(row, source), [])
        messages, values = _placed(chat, values, source)
        return self._with_pictures(self._text.encode_chat(row, messages, source), values)

    def _with_pictures(self, example: Example, values: list[Any]) -> Example:
        spec, source = self._spec, example.source
        marks = np.flatnonzero(example.tokens == spec.image_token)
        if len(marks) != len(values):
            raise UserError(
                f"{source}: the chat template writes {len(marks)} image tokens for {len(values)} images; a text must "
                "not hold the model's own image token, and the model's template must know images."
            )
        pictures = [self._reader.picture(value, source) for value in values]
        repeats = np.ones(len(example.tokens), np.int64)
        repeats[marks] = [spec.tokens(picture.grid) for picture in pictures]
        tokens, targets = np.repeat(example.tokens, repeats), np.repeat(example.targets, repeats)
        targets[np.isin(tokens, (spec.image_token, spec.video_token))] = False
        if tokens[-1] == spec.image_token:
            raise UserError(f"{source}: ends with an image, after which there is nothing to predict.")
        if not targets.any():
            raise UserError(f"{source}: nothing to learn from: only image tokens would count; add an answer in text.")
        grids = tuple(picture.grid for picture in pictures)
        digests = tuple(self._reader.digest(value, source) for value in values)
        positions = token_positions(tokens, grids, spec)
        held = Pictures(tuple(values), grids, digests, positions, spec, self._reader)
        return replace(example, tokens=tokens.astype(np.int32), targets=targets, pictures=held)


def _video_refused(row: dict[str, Any], source: str) -> dict[str, Any]:
    for key in _VIDEO:
        if row.get(key):
            raise UserError(f"{source}: {key!r}: videos are not read yet; give frames as images.")
    return row


def _listed(row: dict[str, Any], source: str) -> list[Any]:
    """The images of the row's own columns."""
    if row.get(IMAGES) is not None and row.get(IMAGE) is not None:
        raise UserError(f"{source}: both {IMAGE!r} and {IMAGES!r}; give one of them.")
    values = row.get(IMAGES)
    if values is None:
        values = [] if row.get(IMAGE) is None else [row[IMAGE]]
    if not isinstance(values, list | tuple):
        raise UserError(f"{source}: {IMAGES!r}: expected a list of paths, got {type(values).__name__}.")
    return list(values)


def _placed(messages: list[dict[str, Any]], values: list[Any], source: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """The messages with a part for each image, and the images in the order of their parts."""
    found: list[dict[str, Any]] = []
    inside: list[Any] = []
    for number, message in enumerate(messages, 1):
        content, named = _parts(message.get("content"), f"{source}: message {number}")
        found.append({**message, "content": content})
        inside += named
    places = len(inside)
    own = [value for value in inside if value is not None]
    if (own and len(own) < places) or (own and values):
        raise UserError(f"{source}: images in the messages and in {IMAGES!r}; give all of them in one place.")
    if own:
        return found, own
    if not places and values:
        _put_first(found, len(values), source)
    elif places > len(values):
        raise UserError(f"{source}: {places} image placeholders, and {len(values)} images; give one for each.")
    elif places < len(values):
        raise UserError(f"{source}: {len(values)} images, and {places} placeholders; mark a place for each.")
    return found, values


def _parts(content: Any, where: str) -> tuple[Any, list[Any]]:
    """Content as the template takes it, and for each image its path, or None where the row lists it."""
    if isinstance(content, str):
        pieces = content.split(PLACEHOLDER)
        if len(pieces) == 1:
            return content, []
        parts: list[dict[str, Any]] = []
        for index, piece in enumerate(pieces):
            parts += [{"type": IMAGE}] if index else []
            parts += [{"type": "text", "text": piece}] if piece else []
        return parts, [None] * (len(pieces) - 1)
    if not isinstance(content, list):
        return content, []
    parts, named = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in (IMAGE, "image_url"):
            value = part.get(kind) if part.get(kind) is not None else part.get("path")
            named.append(value.get("url") if kind == "image_url" and isinstance(value, Mapping) else value)
            parts.append({"type": IMAGE})
        elif kind in _VIDEO:
            raise UserError(f"{where}: videos are not read yet; give frames as images.")
        else:
            raise UserError(f'{where}: expected parts {{"type": "text" or "image", ...}}, got {str(part)[:60]}.')
    if not named:
        return "".join(part["text"] for part in parts), []
    return parts, named


def _put_first(messages: list[dict[str, Any]], count: int, source: str) -> None:
    for message in messages:
        if message["role"] == "user":
            content = message["content"]
            text = [{"type": "text", "text": content}] if content else []
            message["content"] = [{"type": IMAGE}] * count + text
            return
    raise UserError(f"{source}: {count} images, and no user message to hold them.")
