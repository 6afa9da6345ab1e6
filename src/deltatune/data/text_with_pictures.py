"""Gives the images and videos of rows their tokens: one for each feature of the vision tower, which never count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..models.vision.inputs import VisionSpec, single_frames, token_positions
from .example import Example
from .rows.row_formats import Messages
from .vision.media import MediaReader, MediaSize, Pictures
from .vision.messages import IMAGE, VIDEO, media_columns, place_media, write_videos
from .vision.prompt import token_counts
from .vision.videos import video_names, video_text


class PlacedMedium(NamedTuple):
    """An image or video of a row: the number of its message, its value as the row gives it, and its size."""

    message: int
    value: Any
    size: MediaSize


class MediaPlacer:
    """Puts the images and videos of rows into their messages, and into the examples of these.

    The content of a message is a string with the marks "<image>" and "<video>", or a list of parts such as
    {"type": "text", "text": ...}, {"type": "image"} and {"type": "video"}. The files come from the parts themselves
    ("image": PATH), or in order from the row's "images" (or "image") and "videos" (or "video").

    Args:
        spec: The token ids and sizes of the vision tower.
        reader: The reader of images and videos.
        tokenizer: Writes the tokens around a picture.
    """

    def __init__(self, spec: VisionSpec, reader: MediaReader, tokenizer: Any):
        self._spec, self._reader = spec, reader
        self._names = video_names(tokenizer, spec)

    def place(self, row: Any, messages: Messages | None, source: str) -> tuple[Messages | None, list[PlacedMedium]]:
        """Return a row's messages with a part for each image, and the text of each video; and these in order.

        Raises:
            UserError: A file cannot be read, or places and files do not match; the message names `source`.
        """
        columns = media_columns(row, source)
        if messages is None:
            if any(columns.values()):
                medium = "an image" if columns[IMAGE] else "a video"
                raise UserError(f"{source}: a text line has no place for {medium}; use messages or prompt/completion.")
            return None, []
        messages, values = place_media(messages, columns, source)
        contents = [(number, message["content"]) for number, message in enumerate(messages)]
        numbers = [
            number
            for number, content in contents
            if isinstance(content, list)
            for part in content
            if part["type"] in (IMAGE, VIDEO)
        ]
        media = [
            PlacedMedium(number, value, self._reader.read(value, source)[1])
            for number, value in zip(numbers, values, strict=True)
        ]
        texts = [video_text(medium.size.seconds, self._names) for medium in media if medium.size.seconds]
        return write_videos(messages, texts), media

    def with_pictures(self, example: Example, media: Sequence[PlacedMedium]) -> Example:
        """Return the example with each image and video token repeated once for each of its features.

        Raises:
            UserError: The tokens are not those of the media, or no text is left to predict.
        """
        spec, source = self._spec, example.source
        sizes = [medium.size for medium in media]
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
        values = tuple(medium.value for medium in media)
        digests = tuple(self._reader.digest(value, source) for value in values)
        positions = token_positions(tokens, single_frames(grids), spec)
        pictures = Pictures(values, grids, digests, positions, spec, self._reader)
        return replace(example, tokens=tokens.astype(np.int32), targets=targets, pictures=pictures)
