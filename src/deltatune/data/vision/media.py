"""Reads the images and videos of rows; those of an example are read from their files again for each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import UserError
from ...lora.adapter_files import options_of
from ...models.vision.inputs import (
    Grid,
    ImageShapes,
    Picture,
    VisionBatch,
    VisionSpec,
    padded_frames,
    padded_patches,
    single_frames,
    vision_batch,
)
from .images import ImageReader, name_of
from .videos import Video, VideoReader, video_names, video_text
from .videos import name_of as name_of_video

#: The options of a run that say how its images and videos are prepared.
PICTURE_OPTIONS = ("min_pixels", "max_pixels", "fps", "video_max_frames")


class MediaSize(NamedTuple):
    """The size of an image or video: its grid of patches, and for a video the time of each pair of frames (seconds)."""

    grid: Grid
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class MediaReader:
    """Reads the images and videos of rows. A `Video` is a video; any other value is an image."""

    images: ImageReader
    videos: VideoReader

    def read(self, value: Any, source: str) -> tuple[Picture, MediaSize]:
        """Return the patches and the size of an image or video; UserError, naming `source`, if it cannot be read."""
        if isinstance(value, Video):
            clip = self.videos.clip(value, source)
            return clip.picture, MediaSize(clip.picture.grid, tuple(clip.seconds))
        picture = self.images.picture(value, source)
        return picture, MediaSize(picture.grid)

    def name(self, value: Any) -> str:
        """Return the name of an image or video in messages."""
        return name_of_video(value) if isinstance(value, Video) else name_of(value)

    def digest(self, value: Any, source: str) -> bytes:
        """Return a digest of an image or video, by which a resumed run recognises its data."""
        return self.videos.digest(value, source) if isinstance(value, Video) else self.images.digest(value, source)


@dataclass(frozen=True)
class VisionProcessors:
    """The image processor, the numbers of the vision tower and the video processor, if any, of a vision model."""

    processor: Any
    spec: VisionSpec
    videos: Any = None


def media_reader(processors: VisionProcessors, folder: Path, options: Mapping[str, Any]) -> MediaReader:
    """Return the reader of images and videos for training, evaluation and generation alike.

    Relative paths begin at `folder`; of the options of a run, PICTURE_OPTIONS matter. A processor that cuts other
    patches than the vision tower takes is refused by a UserError.
    """
    spec = processors.spec
    for name, needed in {
        "patch_size": spec.patch,
        "temporal_patch_size": spec.temporal,
        "merge_size": spec.merge,
    }.items():
        for processor in (processors.processor, processors.videos):
            actual = getattr(processor, name, needed)
            if actual != needed:
                raise UserError(
                    f"the model's processor has {name} {actual}, and its vision tower {needed}; take the "
                    "preprocessor_config.json of the original model."
                )
    limits = {name: options[name] for name in ("min_pixels", "max_pixels") if options.get(name) is not None}
    images = ImageReader(processors.processor, folder, limits)
    videos = VideoReader(processors.videos, folder, limits, options.get("fps"), options.get("video_max_frames"))
    return MediaReader(images, videos)


def picture_options(options: Mapping[str, Any], adapter_path: str | None) -> dict[str, Any]:
    """Return PICTURE_OPTIONS as they are given and, where they are None, as the adapter in a folder was trained with
    them.

    A UserError says that the adapter's config is missing or damaged.
    """
    trained = options_of(Path(adapter_path)) if adapter_path else {}
    return {name: trained.get(name) if options.get(name) is None else options[name] for name in PICTURE_OPTIONS}


@dataclass(frozen=True, eq=False)
class Pictures:
    """The images and videos of one example, in the order of its tokens. A row of text alone has none.

    Each has the value that the row gives it, which `reader` opens, its grid of patches and a digest of its content.
    `positions`, int32 [3, N], are the rotary positions (time, height, width) of each of the example's N tokens.
    """

    values: tuple[Any, ...]
    grids: tuple[Grid, ...]
    digests: tuple[bytes, ...]
    positions: np.ndarray
    spec: VisionSpec
    reader: MediaReader

    def read(self, source: str) -> list[Picture]:
        """Return the patches of each, read anew; UserError, naming `source`, if a file is gone or has another size."""
        pictures = []
        for value, grid in zip(self.values, self.grids, strict=True):
            picture, _ = self.reader.read(value, source)
            if picture.grid != grid:
                before, now = (" x ".join(map(str, sizes)) for sizes in (grid, picture.grid))
                raise UserError(
                    f"{source}: {self.reader.name(value)}: its size has changed since the run began: {now} patches "
                    f"(frames x rows x columns), and {before} then; put the old file back, or begin the run anew."
                )
            pictures.append(picture)
        return pictures

    def before_text(self, tokens: int) -> Pictures:
        """Return the same of an example with so many tokens of text more."""
        following = self.positions.max() + 1 + np.arange(tokens, dtype=np.int32)
        return replace(self, positions=np.concatenate([self.positions, np.stack([following] * 3)], axis=1))

    def kind_cut(self, tokens: np.ndarray, limit: int) -> str | None:
        """Return "image" or "video" if a cut of the tokens at `limit` goes through one or leaves it last, else None."""
        marks = np.isin(tokens[:limit], (self.spec.image_token, self.spec.video_token))
        before = int(marks.sum())
        ends = self._ends()
        if before == 0 or (before in ends and not marks[-1]):
            return None
        return "video" if isinstance(self.values[int(np.searchsorted(ends, before))], Video) else "image"

    def cut(self, tokens: np.ndarray) -> Pictures:
        """Return the images and videos of the example's first tokens, which must not end inside one."""
        marks = int(np.isin(tokens, (self.spec.image_token, self.spec.video_token)).sum())
        count = int(np.searchsorted(self._ends(), marks, side="right"))
        positions = self.positions[:, : len(tokens)]
        first = {name: getattr(self, name)[:count] for name in ("values", "grids", "digests")}
        return replace(self, **first, positions=positions)

    def _ends(self) -> np.ndarray:
        """Return how many image and video tokens the example has up to the end of each of them."""
        return np.cumsum([self.spec.tokens(grid) for grid in self.grids])


def largest_batch(examples: Sequence[Any], rows: int) -> ImageShapes | None:
    """Return the largest padded sizes that a batch of `rows` rows can have, or None without a vision tower.

    The rows of a batch change from epoch to epoch, so this combines the rows with the most frames, the largest image,
    and the rows with the fewest positions that do not count in the loss.
    """
    media = [example.pictures for example in examples if example.pictures is not None]
    if not media:
        return None
    frames = sorted((sum(grid[0] for grid in pictures.grids) for pictures in media), reverse=True)
    count = sum(frames[row % len(frames)] for row in range(rows))
    uncounted = sorted(example.positions - int(example.targets[1:].sum()) for example in examples)
    fewest = sum(uncounted[row % len(uncounted)] for row in range(rows))
    patches = max((grid[1] * grid[2] for pictures in media for grid in pictures.grids), default=0)
    return ImageShapes(padded_frames(count), padded_patches(patches, media[0].spec) if count else 0, fewest)


def collate_pictures(rows: Sequence[Any], width: int, spec: VisionSpec) -> VisionBatch:
    """Return the vision inputs of rows; None is a blank row, and a batch may be all blank."""
    inputs: list[Any] = []
    for row in rows:
        if row is None:
            inputs.append((np.zeros(0, np.int32), np.zeros((3, 0), np.int32), []))
            continue
        inputs.append((row.tokens[:-1], row.pictures.positions[:, :-1], row.pictures.read(row.source)))
    return vision_batch(inputs, width, spec)


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
        """Return the prompt's tokens, as the chat template wrote them, with those of images and videos repeated by
        token_counts.
        """
        written = np.array(tokens)
        return np.repeat(written, token_counts(written, self.sizes, self.spec, source)).tolist()


def token_counts(tokens: np.ndarray, sizes: Sequence[MediaSize], spec: VisionSpec, source: str) -> np.ndarray:
    """Return how often each token [N] that the chat template wrote stands in the model's input, int64 [N].

    A token of an image or video stands there once for each feature, and any other once. A UserError, naming `source`,
    says that the tokens are not those of `sizes`, which are in the order of the conversation.
    """
    tokens_of = ((spec.video_token if size.seconds else spec.image_token, size.grid[0]) for size in sizes)
    expected = [token for token, blocks in tokens_of for _ in range(blocks)]
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
