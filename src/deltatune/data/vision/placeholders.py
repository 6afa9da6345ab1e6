"""Repeats the one token that a chat template writes for an image or a pair of frames, once for each of its features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import UserError
from ...models.vision.inputs import VisionSpec, single_frames
from .media import MediaSize


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
    marks = _marks(tokens, sizes, spec, source)
    counts = np.ones(len(tokens), np.int64)
    counts[marks] = [spec.tokens(grid) for grid in single_frames([size.grid for size in sizes])]
    return counts


def _marks(tokens: np.ndarray, sizes: Sequence[MediaSize], spec: VisionSpec, source: str) -> np.ndarray:
    expected = [spec.video_token if size.seconds else spec.image_token for size in sizes for _ in size.blocks]
    marks = np.flatnonzero(np.isin(tokens, (spec.image_token, spec.video_token)))
    written = tokens[marks].tolist()
    for token, kind, media in (
        (spec.image_token, "image", "images"),
        (spec.video_token, "video", "pairs of frames"),
    ):
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
    return marks
