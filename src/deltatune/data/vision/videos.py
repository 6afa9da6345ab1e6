"""Opens the videos of a data set: files, from which frames are sampled as mlx-vlm does, or lists of frames."""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import UserError
from ...models.vision.inputs import Grid, Picture, VisionSpec
from .image_files import file_content, image_file, media_path, open_image, shown

# The sampling of Qwen3-VL's processors, used where the model's own processor does not define it.
_SAMPLING = {"fps": 2.0, "min_frames": 4, "max_frames": 768}
# Some files only estimate their number of frames, and may count up to this many that do not exist.
_MISCOUNTED = 3


@dataclass(frozen=True, eq=False)
class Video:
    """A video as a row gives it: a path or a list of frames, and its frames per second if the row says them."""

    value: Any
    fps: float | None = None


class Clip(NamedTuple):
    """The patches of a video, and the time of each pair of its frames, in seconds."""

    picture: Picture
    seconds: list[float]


class _Frames(NamedTuple):
    """Frames uint8 [N, H, W, 3], their numbers in the source, and the source's frames per second."""

    pixels: np.ndarray
    numbers: list[int]
    rate: float


@dataclass(frozen=True, eq=False)
class VideoReader:
    """Turns a video of a row into patches.

    Args:
        processor: the model's video processor, or None if it has none.
        folder: the folder to which relative paths refer.
        limits: min_pixels and max_pixels of a frame; the model's own limit for a whole video holds as well.
        fps: the frames per second to take from a file, or at which a list of frames was recorded; None takes the
            processor's own.
        max_frames: the largest number of frames to take; None takes the processor's own.
    """

    processor: Any
    folder: Path
    limits: Mapping[str, int]
    fps: float | None = None
    max_frames: int | None = None

    def __post_init__(self) -> None:
        if self.fps is not None and not 0 < self.fps < math.inf:
            raise UserError(f"fps: expected a number above 0, got {self.fps}.")
        if self.max_frames is not None and self.max_frames < 2:
            raise UserError(f"video_max_frames: expected 2 or more, got {self.max_frames}.")

    def clip(self, video: Video, source: str) -> Clip:
        """Decode a video; UserError, naming `source`, if it is missing, damaged, too short or of an unfit size."""
        if self.processor is None:
            raise UserError(
                f"{source}: {name_of(video)}: the model's processor reads no videos; give frames as images."
            )
        frames = self._frames(video, source)
        if len(frames.pixels) < 2:
            raise UserError(
                f"{source}: {name_of(video)}: {len(frames.pixels)} frame{'s' * (len(frames.pixels) != 1)}; a video "
                "needs 2 or more. Give a single picture as an image."
            )
        try:
            processed = self._limited(len(frames.pixels))(videos=[frames.pixels], do_sample_frames=False)
        except (ValueError, TypeError) as error:
            raise UserError(f"{source}: {name_of(video)}: the model's video processor refuses it: {error}.") from error
        rows = np.asarray(processed["video_grid_thw"]).reshape(-1, 3)
        grid: Grid = (int(rows[0, 0]), int(rows[0, 1]), int(rows[0, 2]))
        picture = Picture(np.asarray(processed["pixel_values_videos"], np.float32), grid)
        return Clip(picture, _seconds(frames, grid[0]))

    def digest(self, video: Video, source: str) -> bytes:
        """Return a digest of the video, by which a resumed run recognises its data."""
        if isinstance(content := self._source(video, source), Path):
            with content.open("rb") as file:
                return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
        total = hashlib.blake2b(digest_size=16)
        for frame in content:
            total.update(file_content(image_file(frame, self.folder, source)))
        return total.digest()

    def _frames(self, video: Video, source: str) -> _Frames:
        """Return the sampled frames of a file or a list."""
        content = self._source(video, source)
        if isinstance(content, Path):
            return self._decoded(content, video, f"{source}: {name_of(video)}")
        numbers = list(range(len(content)))
        limit = self._sampling("max_frames", self.max_frames)
        if len(content) > limit:
            numbers = np.linspace(0, len(content) - 1, int(limit)).round().astype(int).tolist()
        opened = []
        for number in numbers:
            where = f"{source}: frame {number + 1} of a video"
            opened.append(np.asarray(open_image(image_file(content[number], self.folder, where), where)))
        sizes = sorted({f"{frame.shape[1]}x{frame.shape[0]}" for frame in opened})
        if len(sizes) > 1:
            raise UserError(
                f"{source}: {name_of(video)}: frames of {' and '.join(sizes[:3])} pixels; expected one size."
            )
        pixels = np.stack(opened) if opened else np.zeros((0, 1, 1, 3), np.uint8)
        return _Frames(pixels, numbers, self._sampling("fps", video.fps or self.fps))

    def _decoded(self, path: Path, video: Video, named: str) -> _Frames:
        """Return the sampled frames of a file."""
        # This keeps FFmpeg from writing to standard error; the messages below say what is wrong.
        os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
        try:
            import cv2
        except ImportError as error:
            raise UserError(
                f"{named}: reading video files needs OpenCV: pip install opencv-python; or give a list of frames."
            ) from error
        capture = cv2.VideoCapture(str(path))
        try:
            total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)) if capture.isOpened() else 0
            if total < 1:
                raise UserError(
                    f"{named}: no video, truncated, or of a format that OpenCV does not read; give another file."
                )
            rate = capture.get(cv2.CAP_PROP_FPS) or 1.0
            numbers = sampled_frames(
                total,
                rate,
                self._sampling("fps", video.fps or self.fps),
                int(self._sampling("min_frames", None)),
                int(self._sampling("max_frames", self.max_frames)),
            )
            pixels = []
            for index, number in enumerate(numbers):
                earliest = max(number - _MISCOUNTED, numbers[index - 1] + 1 if index else 0)
                frame, numbers[index] = _read(cv2, capture, number, earliest if number == total - 1 else number)
                if frame is None:
                    raise UserError(f"{named}: truncated or damaged: frame {number + 1} of {total} cannot be read.")
                pixels.append(frame)
        finally:
            capture.release()
        return _Frames(np.stack(pixels) if pixels else np.zeros((0, 1, 1, 3), np.uint8), numbers, rate)

    def _source(self, video: Video, source: str) -> Path | Sequence[Any]:
        """Return the file of a video, or its list of frames."""
        value = video.value
        if isinstance(value, list | tuple):
            if not value:
                raise UserError(f"{source}: a video with no frames; give 2 or more, or leave it out.")
            return value
        if isinstance(value, Mapping) and isinstance(value.get("path"), str):
            value = value["path"]
        if not isinstance(value, str):
            actual = f"{type(value).__name__} {str(value)[:60]!r}"
            raise UserError(f"{source}: expected the path of a video, or a list of frames, got {actual}.")
        return media_path("video", value, self.folder, source)

    def _sampling(self, name: str, asked: float | None) -> float:
        """Return a sampling option: what the user asked for, else the processor's own, else Qwen3-VL's."""
        return asked or getattr(self.processor, name, None) or _SAMPLING[name]

    def _limited(self, frames: int) -> Any:
        """Return the processor with the limits for a video of this number of frames."""
        if not self.limits:
            return self.processor
        limited = copy.copy(self.processor)
        if "min_pixels" in self.limits:
            limited.min_pixels = self.limits["min_pixels"] * frames
        if "max_pixels" in self.limits:
            limited.max_pixels = min(limited.max_pixels, self.limits["max_pixels"] * frames)
        return limited


def sampled_frames(total: int, rate: float, fps: float, least: int, most: int) -> list[int]:
    """Choose evenly spaced frames of a file, an even number of them if it has two or more.

    Args:
        total: the number of frames in the file.
        rate: its frames per second.
        fps: the frames per second to take.
        least, most: the smallest and the largest number of frames to take.

    Returns:
        The numbers of the frames, from 0.

    Source:
        mlx_vlm.utils.load_video.
    """
    highest = min(most, total) // 2 * 2
    count = min(max(total / rate * fps, math.ceil(least / 2) * 2), highest, total)
    return np.linspace(0, total - 1, max(int(count) // 2 * 2, min(total, 1))).round().astype(int).tolist()


def video_names(tokenizer: Any, spec: VisionSpec) -> tuple[str, str, str]:
    """Return the tokens that `video_text` needs, as the tokenizer writes them."""
    start, token, end = tokenizer.convert_ids_to_tokens([spec.start_token, spec.video_token, spec.end_token])
    return start, token, end


def video_text(seconds: Sequence[float], names: tuple[str, str, str]) -> str:
    """Return the text that stands for a video in a prompt: for each pair of frames, its time and a block of tokens.

    Args:
        seconds: the time of each pair of frames.
        names: the token that begins a block, the one that stands for a feature, and the one that ends a block. The
            second is written once here and repeated after tokenisation.

    Source:
        Qwen3VLProcessor of transformers and of mlx-vlm.
    """
    return "".join(f"<{at:.1f} seconds>{''.join(names)}" for at in seconds)


def name_of(video: Video) -> str:
    """Return what messages call a video."""
    value = video.value.get("path") if isinstance(video.value, Mapping) else video.value
    return f"video {shown(value)}" if isinstance(value, str) else "video from frames"


def _read(cv2: Any, capture: Any, number: int, earliest: int) -> tuple[np.ndarray | None, int]:
    """Return frame `number`, or the nearest readable one before it, down to `earliest` (else None), and its number."""
    for at in range(number, earliest - 1, -1):
        capture.set(cv2.CAP_PROP_POS_FRAMES, at)
        success, frame = capture.read()
        if success:
            return cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), at
    return None, number


def _seconds(frames: _Frames, count: int) -> list[float]:
    """Return the mean time of the first and last frame of each of `count` groups, padding with the last frame."""
    numbers = np.array(frames.numbers, float)
    size = -(-len(numbers) // count)
    numbers = np.pad(numbers, (0, size * count - len(numbers)), mode="edge").reshape(count, size)
    return ((numbers[:, 0] + numbers[:, -1]) / 2 / frames.rate).tolist()
