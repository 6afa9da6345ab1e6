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
    """The patches of the images and videos of a prompt: of one message, which they stand before, or of a conversation.

    `video_texts` hold, for each video, the text that stands for it in the prompt.
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
        """Read images and videos in the order of the prompt, each as a row of data gives it.

        A UserError, naming `source`, says that a file cannot be read, or is of an unfit kind.
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
        """Return the tokens that the chat template wrote, with those of images and videos repeated by token_counts."""
        written = np.array(tokens)
        return np.repeat(written, token_counts(written, self.sizes, self.spec, source)).tolist()


def token_counts(tokens: np.ndarray, sizes: Sequence[MediaSize], spec: VisionSpec, source: str) -> np.ndarray:
    """Return how often each token [N] that the chat template wrote stands in the model's input, int64 [N].

    A token of an image or video stands there once for each feature, and any other once. A UserError, naming `source`,
    says that the tokens are not those of `sizes`, which are in the order of the conversation.
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
