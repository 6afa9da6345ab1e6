"""Rows with images and videos to examples: each place expanded to as many tokens as it has features, and masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import UserError
from ...models.vision.inputs import VisionSpec, single_frames, token_positions
from ..example import Example
from ..text import TextEncoder
from .media import MediaReader, MediaSize, Pictures
from .messages import IMAGE, VIDEO, listed, placed
from .videos import video_text


class VisionEncoder:
    """Turns rows of text, images and videos into examples; what counts in the loss is TextEncoder's to say.

    A message's content is a string, with "<image>" or "<video>" where one stands, or a list of {"type": "text", "text":
    ...}, {"type": "image"} and {"type": "video"} parts; files come from the parts themselves ("image": PATH), or in
    order from the row's "images" (or "image") and "videos" (or "video").

    names: how the tokenizer writes what begins the features of a picture, stands for one of a video, and ends them.
    """

    def __init__(self, text: TextEncoder, spec: VisionSpec, reader: MediaReader, names: tuple[str, str, str]):
        self._text, self._spec, self._reader, self._names = text, spec, reader, names

    @property
    def kinds(self) -> set[str]:
        """Which formats were seen."""
        return self._text.kinds

    def __call__(self, row: Any, source: str) -> Example:
        """The row's example, at full length. UserError, with `source`, where the row cannot be trained on."""
        if not isinstance(row, Mapping):
            return self._text(row, source)
        columns = listed(row, source)
        chat = self._text.conversation(row, source)
        if chat is None:
            if any(columns.values()):
                what = "an image" if columns[IMAGE] else "a video"
                raise UserError(f"{source}: a text line has no place for {what}; use messages or prompt/completion.")
            return self._with_pictures(self._text(row, source), [], [])
        messages, values = placed(chat, columns, source)
        sizes = [self._reader.look(value, source) for value in values]
        messages = self._told(messages, [size for size in sizes if size.seconds])
        return self._with_pictures(self._text.encode_chat(row, messages, source), values, sizes)

    def _told(self, messages: list[dict[str, Any]], videos: list[MediaSize]) -> list[dict[str, Any]]:
        """The messages with every video written out as its times and one token for each of its pairs of frames."""
        texts = iter([video_text(size.seconds, self._names) for size in videos])
        found = []
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                content = [{"type": "text", "text": next(texts)} if part["type"] == VIDEO else part for part in content]
            found.append({**message, "content": content})
        return found

    def _with_pictures(self, example: Example, values: list[Any], sizes: Sequence[MediaSize]) -> Example:
        spec, source = self._spec, example.source
        marks = self._marks(example, sizes)
        grids = tuple(size.grid for size in sizes)
        repeats = np.ones(len(example.tokens), np.int64)
        repeats[marks] = [spec.tokens(grid) for grid in single_frames(grids)]
        tokens, targets = np.repeat(example.tokens, repeats), np.repeat(example.targets, repeats)
        targets[np.isin(tokens, (spec.image_token, spec.video_token))] = False
        if tokens[-1] in (spec.image_token, spec.video_token):
            raise UserError(f"{source}: ends with an image, after which there is nothing to predict.")
        if not targets.any():
            raise UserError(f"{source}: nothing to learn from: only image tokens would count; add an answer in text.")
        digests = tuple(self._reader.digest(value, source) for value in values)
        positions = token_positions(tokens, single_frames(grids), spec)
        held = Pictures(tuple(values), grids, digests, positions, spec, self._reader)
        return replace(example, tokens=tokens.astype(np.int32), targets=targets, pictures=held)

    def _marks(self, example: Example, sizes: Sequence[MediaSize]) -> np.ndarray:
        """Where the template has written a token for an image or a pair of a video's frames, compared with `sizes`."""
        spec = self._spec
        expected = [spec.video_token if size.seconds else spec.image_token for size in sizes for _ in size.blocks]
        marks = np.flatnonzero(np.isin(example.tokens, (spec.image_token, spec.video_token)))
        found = example.tokens[marks].tolist()
        for token, kind, whole in (
            (spec.image_token, "image", "images"),
            (spec.video_token, "video", "pairs of frames"),
        ):
            if found.count(token) != expected.count(token):
                raise UserError(
                    f"{example.source}: the chat template writes {found.count(token)} {kind} tokens for "
                    f"{expected.count(token)} {whole}; a text must not hold the model's own {kind} token, and the "
                    f"model's template must know {kind}s."
                )
        if found != expected:
            raise UserError(f"{example.source}: the chat template writes images and videos in another order.")
        return marks
