"""The images and videos of a prompt, which are prepared as those of training rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...models.vision.inputs import Picture, VisionSpec
from .media import MediaReader, MediaSize
from .placeholders import token_counts
from .videos import video_names, video_text


@dataclass(frozen=True, eq=False)
class PromptPictures:
    """Images and videos of a prompt: of one message, which they stand before, or of a conversation.

    Attributes:
        images: The patches of each image.
        videos: The patches of each video.
        sizes: The sizes of all of them.
        video_texts: For each video, the text that stands for it in the prompt.
        spec: The token ids and sizes of the vision tower.
    """

    images: list[Picture]
    videos: list[Picture]
    sizes: list[MediaSize]
    video_texts: list[str]
    spec: VisionSpec

    @classmethod
    def read(
        cls, values: Sequence[Any], source: str, reader: MediaReader, spec: VisionSpec, tokenizer: Any
    ) -> PromptPictures:
        """Read the files.

        Args:
            values: The images and videos in the order of the prompt, as a row of data would give them.
            source: Where they came from, for messages to the user.
            reader: The reader that training uses.
            spec: The token ids and sizes of the vision tower.
            tokenizer: The tokenizer, which writes the tokens around a frame.

        Raises:
            UserError: A file cannot be read, or is of an unfit kind.
        """
        media = [reader.read(value, source) for value in values]
        names = video_names(tokenizer, spec)
        return cls(
            images=[picture for picture, size in media if not size.seconds],
            videos=[picture for picture, size in media if size.seconds],
            sizes=[size for _, size in media],
            video_texts=[video_text(size.seconds, names) for _, size in media if size.seconds],
            spec=spec,
        )

    def placed(self, tokens: Sequence[int], source: str) -> list[int]:
        """Return the prompt's tokens with each image and video token repeated once for each of its features.

        Args:
            tokens: The tokens of the prompt, as the chat template wrote them.
            source: Where the prompt came from, for messages to the user.

        Raises:
            UserError: The prompt's tokens of images and videos are not those of the files.
        """
        written = np.array(tokens)
        return np.repeat(written, token_counts(written, self.sizes, self.spec, source)).tolist()
