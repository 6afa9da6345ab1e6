"""Turns rows with images and videos into examples.

Each image or video becomes as many tokens as the vision tower gives features for it. None of them counts in the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import UserError
from ..models.vision.inputs import VisionSpec, single_frames, token_positions
from .example import Example
from .rows.unread_columns import MARKS_IN_TEXT
from .text import TextEncoder
from .vision.media import MediaReader, MediaSize, Pictures
from .vision.messages import IMAGE, VIDEO, has_mark_in_text, media_columns, place_media, write_videos
from .vision.placeholders import token_counts
from .vision.videos import video_text


class VisionEncoder:
    """Turns rows of text, images and videos into examples. TextEncoder decides which text counts in the loss.

    The content of a message is a string with the marks "<image>" and "<video>", or a list of parts such as
    {"type": "text", "text": ...}, {"type": "image"} and {"type": "video"}. The files come from the parts themselves
    ("image": PATH), or in order from the row's "images" (or "image") and "videos" (or "video").

    Args:
        text: The encoder of the text.
        spec: The token ids and sizes of the vision tower.
        reader: The reader of images and videos.
        names: How the tokenizer writes the tokens for the begin of a picture, a feature of a video, and the end of a
            picture.
    """

    def __init__(self, text: TextEncoder, spec: VisionSpec, reader: MediaReader, names: tuple[str, str, str]):
        self._text, self._spec, self._reader, self._names = text, spec, reader, names

    def stream(self, rows: Iterable[tuple[str, Any]], count: int) -> Iterator[list[Example]]:
        """Yield the examples of each row, in order."""
        return (self(row, source) for source, row in rows)

    def __call__(self, row: Any, source: str) -> list[Example]:
        """Return the row's examples at full length; UserError, naming `source`, if it cannot be trained on."""
        formats = self._text.formats
        chat = formats.messages(row, source)
        columns = media_columns(row, source)
        if chat is None:
            if any(columns.values()):
                what = "an image" if columns[IMAGE] else "a video"
                raise UserError(f"{source}: a text line has no place for {what}; use messages or prompt/completion.")
            return [self._with_pictures(self._text.encode_text(formats.text(row, source)), [], [])]
        messages, values = place_media(chat, columns, source)
        formats.unread[MARKS_IN_TEXT] += has_mark_in_text(messages)
        sizes = [self._reader.read(value, source)[1] for value in values]
        written = write_videos(messages, [video_text(size.seconds, self._names) for size in sizes if size.seconds])
        counts = np.cumsum([_media(message["content"]) for message in messages])
        conversation = self._text.conversation(written, row, source)
        # A row of a conversation that takes several holds the first images of it.
        return [
            self._with_pictures(example, values[: counts[number - 1]], sizes[: counts[number - 1]])
            for example, number in self._text.encode_chat(conversation)
        ]

    def _with_pictures(self, example: Example, values: list[Any], sizes: Sequence[MediaSize]) -> Example:
        """Return the example with each image and video token repeated once for each of its features."""
        spec, source = self._spec, example.source
        grids = tuple(size.grid for size in sizes)
        repeats = token_counts(example.tokens, sizes, spec, source)
        tokens, targets = np.repeat(example.tokens, repeats), np.repeat(example.targets, repeats)
        targets[np.isin(tokens, (spec.image_token, spec.video_token))] = False
        if tokens[-1] in (spec.image_token, spec.video_token):
            raise UserError(
                f"{source}: the row ends with an image, after which there is nothing to predict; add an answer in text."
            )
        if not targets.any():
            raise UserError(f"{source}: nothing to learn from: only image tokens would count; add an answer in text.")
        digests = tuple(self._reader.digest(value, source) for value in values)
        positions = token_positions(tokens, single_frames(grids), spec)
        pictures = Pictures(tuple(values), grids, digests, positions, spec, self._reader)
        return replace(example, tokens=tokens.astype(np.int32), targets=targets, pictures=pictures)


def _media(content: Any) -> int:
    return sum(part["type"] in (IMAGE, VIDEO) for part in content) if isinstance(content, list) else 0
