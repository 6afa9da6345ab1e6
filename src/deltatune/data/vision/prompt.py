"""The images and videos of a prompt, and the tokens that they take in any conversation: one for each feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import UserError
from ...models.vision.inputs import Picture, VisionSpec, single_frames
from .media import MediaReader, MediaSize
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


def token_counts(tokens: np.ndarray, sizes: Sequence[MediaSize], spec: VisionSpec, source: str) -> np.ndarray:
    """Return how often each token of a conversation stands in the model's input: once, or once for each feature.

    Args:
        tokens: The token ids [N] that the chat template wrote.
        sizes: The sizes of the images and videos, in the order of the conversation.
        spec: The token ids and sizes of the vision tower.
        source: Where the conversation came from, for messages to the user.

    Returns:
        int64 [N].

    Raises:
        UserError: The tokens of images and videos are not those of `sizes`.
    """
    expected = [spec.video_token if size.seconds else spec.image_token for size in sizes for _ in size.blocks]
    marks = np.flatnonzero(np.isin(tokens, (spec.image_token, spec.video_token)))
    written = tokens[marks].tolist()
    kinds = ((spec.image_token, "image", "images"), (spec.video_token, "video", "pairs of frames"))
    for token, kind, media in kinds:
        if written.count(token) != expected.count(token):
            raise UserError(
                f"{source}: the chat template writes {written.count(token)} {kind} tokens for "
                f"{expected.count(token)} {media}; a text must not hold the model's own {kind} token, and the "
                f"model's template must know {kind}s."
            )
    if written != expected:
        raise UserError(
            f"{source}: the chat template writes images and videos in another order than the row; "
            "put each where the template expects it."
        )
    counts = np.ones(len(tokens), np.int64)
    counts[marks] = [spec.tokens(grid) for grid in single_frames([size.grid for size in sizes])]
    return counts
