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
        images: the patches of each image.
        videos: the patches of each video.
        sizes: the sizes of all of them.
        video_texts: for each video, the text that stands for it in the prompt.
        spec: the token ids and sizes of the vision tower.
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
            values: the images and videos in the order of the prompt, as a row of data would give them.
            source: where they came from, for messages to the user.
            reader: the reader that training uses.
            spec: the token ids and sizes of the vision tower.
            tokenizer: the tokenizer, which writes the tokens around a frame.

        Raises:
            UserError: a file cannot be read, or is of an unfit kind.
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
            tokens: the tokens of the prompt, as the chat template wrote them.
            source: where the prompt came from, for messages to the user.

        Raises:
            UserError: the prompt's tokens of images and videos are not those of the files.
        """
        written = np.array(tokens)
        return np.repeat(written, token_counts(written, self.sizes, self.spec, source)).tolist()
