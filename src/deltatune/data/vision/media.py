"""The images and videos of one example, read again whenever a batch needs them, and what their tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...models.vision.inputs import (
    Grid,
    ImageShapes,
    Picture,
    VisionBatch,
    VisionSpec,
    padded_frames,
    padded_patches,
    vision_batch,
)
from .images import ImageReader
from .videos import Video, VideoReader


class MediaSize(NamedTuple):
    """What an image or a video takes in a prompt: its grid, and for a video the second of each pair of frames."""

    grid: Grid
    seconds: tuple[float, ...] = ()

    @property
    def blocks(self) -> range:
        """Runs of tokens that stand for it: one for an image, one for each pair of frames."""
        return range(self.grid[0])


@dataclass(frozen=True, eq=False)
class MediaReader:
    """Reads whatever a row gives to look at: a Video is one, anything else is an image."""

    images: ImageReader
    videos: VideoReader

    def picture(self, value: Any, source: str) -> Picture:
        """Its patches. UserError, with `source`, where it cannot be read."""
        return (
            self.videos.clip(value, source).picture if isinstance(value, Video) else self.images.picture(value, source)
        )

    def look(self, value: Any, source: str) -> MediaSize:
        """What it takes in a prompt."""
        if isinstance(value, Video):
            clip = self.videos.clip(value, source)
            return MediaSize(clip.picture.grid, tuple(clip.seconds))
        return MediaSize(self.images.picture(value, source).grid)

    def digest(self, value: Any, source: str) -> bytes:
        """Tells it from another, to resume on the same data."""
        return self.videos.digest(value, source) if isinstance(value, Video) else self.images.digest(value, source)


@dataclass(frozen=True, eq=False)
class Pictures:
    """values: what the row gave for each image and video, in the order of the tokens; grids, and digests to tell them
    apart.

    positions: int32 [3, N], for each of the example's tokens. A row of text has no values.
    """

    values: tuple[Any, ...]
    grids: tuple[Grid, ...]
    digests: tuple[bytes, ...]
    positions: np.ndarray
    spec: VisionSpec
    reader: MediaReader

    def cut_by(self, tokens: np.ndarray, limit: int) -> str | None:
        """Which kind, image or video, a cut of the example's tokens at `limit` goes through or leaves at the end."""
        marks = np.isin(tokens[:limit], (self.spec.image_token, self.spec.video_token))
        before, ends = int(marks.sum()), self._ends()
        if before == 0 or (before in ends and not marks[-1]):
            return None
        return "video" if isinstance(self.values[int(np.searchsorted(ends, before))], Video) else "image"

    def cut(self, tokens: np.ndarray) -> Pictures:
        """What is left for the first tokens of the example; the cut goes through no image and no video."""
        marks = int(np.isin(tokens, (self.spec.image_token, self.spec.video_token)).sum())
        n = int(np.searchsorted(self._ends(), marks, side="right"))
        positions = self.positions[:, : len(tokens)]
        return replace(
            self,
            values=self.values[:n],
            grids=self.grids[:n],
            digests=self.digests[:n],
            positions=positions,
        )

    def _ends(self) -> np.ndarray:
        """How many tokens of pictures there are to the end of each."""
        return np.cumsum([self.spec.tokens(grid) for grid in self.grids])


def largest_batch(examples: Sequence[Any], rows: int) -> ImageShapes | None:
    """The most that a batch of `rows` of these examples is padded to, or None without a vision tower.

    Which rows meet in a batch changes from epoch to epoch, so this takes those with most frames, the largest image, and
    the rows of which most counts.
    """
    held = [example.pictures for example in examples if example.pictures is not None]
    if not held:
        return None
    frames = sorted((sum(grid[0] for grid in each.grids) for each in held), reverse=True)
    count = sum(frames[row % len(frames)] for row in range(rows))
    silent = sorted(example.positions - int(example.targets[1:].sum()) for example in examples)
    quiet = sum(silent[row % len(silent)] for row in range(rows))
    patches = max((grid[1] * grid[2] for each in held for grid in each.grids), default=0)
    return ImageShapes(padded_frames(count), padded_patches(patches, held[0].spec) if count else 0, quiet)


def collate_pictures(rows: Sequence[Any], width: int) -> VisionBatch | None:
    """The vision inputs of rows of examples (None: blank), or None where they are of a model without a vision tower."""
    first = next((row.pictures for row in rows if row is not None and row.pictures is not None), None)
    if first is None:
        return None
    ready: list[Any] = []
    for row in rows:
        if row is None:
            ready.append((np.zeros(0, np.int32), np.zeros((3, 0), np.int32), []))
            continue
        held = row.pictures
        pictures = [held.reader.picture(value, row.source) for value in held.values]
        ready.append((row.tokens[:-1], held.positions[:, :-1], pictures))
    return vision_batch(ready, width, first.spec)
