"""Opens the videos of a data set: files, sampled as mlx-vlm samples them, or lists of frames."""

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
from ...models.vision.inputs import Grid, Picture, VisionSpec, single_frames
from .images import image_file, open_image

# What Qwen3-VL's processors sample by, where the model's own says nothing else.
_SAMPLING = {"fps": 2.0, "min_frames": 4, "max_frames": 768}
# Containers that estimate their length may count a few frames that are not there.
_MISCOUNTED = 3


@dataclass(frozen=True, eq=False)
class Video:
    """What a row gives for a video: a path, or a list of frames; fps: frames a second, where the row says."""

    value: Any
    fps: float | None = None


class Clip(NamedTuple):
    """The patches of a video, and the second at which each pair of frames stands."""

    picture: Picture
    seconds: list[float]


class _Frames(NamedTuple):
    """Frames uint8 [N,H,W,3], their numbers in the source, and the source's frames a second."""

    pixels: np.ndarray
    numbers: list[int]
    rate: float


@dataclass(frozen=True, eq=False)
class VideoReader:
    """Turns what a row gives for a video into patches.

    processor: the model's video processor (None: it has none). folder: where relative paths begin. limits: min_pixels
    and max_pixels of a frame; the model's own limit for a whole video holds besides. fps: how many frames a second are
    taken from a file, or a list of frames was taken at; max_frames: how many at most; without them the processor's own.
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
        """Decode a video. UserError, with `source`, where it is missing, damaged, too short or of an odd shape."""
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
            found = self._limited(len(frames.pixels))(videos=[frames.pixels], do_sample_frames=False)
        except (ValueError, TypeError) as error:
            raise UserError(f"{source}: {name_of(video)}: the model's video processor refuses it: {error}.") from error
        rows = np.asarray(found["video_grid_thw"]).reshape(-1, 3)
        grid: Grid = (int(rows[0, 0]), int(rows[0, 1]), int(rows[0, 2]))
        picture = Picture(np.asarray(found["pixel_values_videos"], np.float32), grid)
        return Clip(picture, _seconds(frames, grid[0]))

    def digest(self, video: Video, source: str) -> bytes:
        """Tells this video from another, to resume on the same data."""
        if isinstance(path := self._source(video, source), Path):
            with path.open("rb") as file:
                return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
        total = hashlib.blake2b(digest_size=16)
        for frame in path:
            total.update(_content(image_file(frame, self.folder, source)))
        return total.digest()

    def _frames(self, video: Video, source: str) -> _Frames:
        found = self._source(video, source)
        if isinstance(found, Path):
            return self._decoded(found, video, f"{source}: {name_of(video)}")
        numbers = list(range(len(found)))
        most = self._sampling("max_frames", self.max_frames)
        if len(found) > most:
            numbers = np.linspace(0, len(found) - 1, int(most)).round().astype(int).tolist()
        opened = []
        for number in numbers:
            where = f"{source}: frame {number + 1} of a video"
            opened.append(np.asarray(open_image(image_file(found[number], self.folder, where), where)))
        sizes = sorted({f"{each.shape[1]}x{each.shape[0]}" for each in opened})
        if len(sizes) > 1:
            raise UserError(
                f"{source}: {name_of(video)}: frames of {' and '.join(sizes[:3])} pixels; expected one size."
            )
        pixels = np.stack(opened) if opened else np.zeros((0, 1, 1, 3), np.uint8)
        return _Frames(pixels, numbers, self._sampling("fps", video.fps or self.fps))

    def _decoded(self, path: Path, video: Video, named: str) -> _Frames:
        # FFmpeg writes its own complaints on standard error; what is wrong is said here.
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
                raise UserError(f"{named}: no video, truncated, or of a format that OpenCV does not read.")
            rate = capture.get(cv2.CAP_PROP_FPS) or 1.0
            numbers = sampled(
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
        """A file, or a list of frames."""
        value = video.value
        if isinstance(value, list | tuple):
            if not value:
                raise UserError(f"{source}: a video with no frames; give 2 or more, or leave it out.")
            return value
        if isinstance(value, Mapping) and isinstance(value.get("path"), str):
            value = value["path"]
        if not isinstance(value, str):
            shown = f"{type(value).__name__} {str(value)[:60]!r}"
            raise UserError(f"{source}: expected the path of a video, or a list of frames, got {shown}.")
        if value.startswith(("http://", "https://", "data:")):
            raise UserError(f"{source}: video {value[:60]}: expected a path; download it, and give its path.")
        path = self.folder / Path(value).expanduser()
        if not path.is_file():
            raise UserError(f"{source}: video {value}: no such file ({path}); paths begin at the data's folder.")
        return path

    def _sampling(self, name: str, asked: float | None) -> float:
        return asked or getattr(self.processor, name, None) or _SAMPLING[name]

    def _limited(self, frames: int) -> Any:
        """The processor, with limits for a video of so many frames."""
        if not self.limits:
            return self.processor
        limited = copy.copy(self.processor)
        if "min_pixels" in self.limits:
            limited.min_pixels = self.limits["min_pixels"] * frames
        if "max_pixels" in self.limits:
            limited.max_pixels = min(limited.max_pixels, self.limits["max_pixels"] * frames)
        return limited


def sampled(total: int, rate: float, fps: float, least: int, most: int) -> list[int]:
    """The numbers of the frames taken from a file of `total` at `rate` (mlx_vlm.utils.load_video): an even count."""
    highest = min(most, total) // 2 * 2
    count = min(max(total / rate * fps, math.ceil(least / 2) * 2), highest, total)
    return np.linspace(0, total - 1, max(int(count) // 2 * 2, min(total, 1))).round().astype(int).tolist()


def video_names(tokenizer: Any, spec: VisionSpec) -> tuple[str, str, str]:
    """The tokens of `video_text` as the tokenizer writes them."""
    start, token, end = tokenizer.convert_ids_to_tokens([spec.start_token, spec.video_token, spec.end_token])
    return start, token, end


def video_text(seconds: Sequence[float], names: tuple[str, str, str]) -> str:
    """What stands in a prompt for a video: one block of tokens for each pair of frames, after its time.

    names: of the token that begins a block, that of a feature (here once; it is repeated later), and that which ends
    it. Source: Qwen3VLProcessor of transformers, and of mlx-vlm.
    """
    return "".join(f"<{at:.1f} seconds>{''.join(names)}" for at in seconds)


def video_texts(tokenizer: Any, clips: Sequence[Clip], spec: VisionSpec) -> list[str]:
    """`video_text` of each clip."""
    names = video_names(tokenizer, spec)
    return [video_text(clip.seconds, names) for clip in clips]


def with_features(tokens: Sequence[int], clips: Sequence[Clip], spec: VisionSpec) -> list[int]:
    """The tokens of a prompt with as many for each pair of frames as it has features."""
    counts = [spec.tokens(grid) for grid in single_frames([clip.picture.grid for clip in clips])]
    found = np.array(tokens)
    marks = np.flatnonzero(found == spec.video_token)
    if len(marks) != len(counts):
        raise UserError("--prompt: it must not hold the model's own video token.")
    repeats = np.ones(len(found), np.int64)
    repeats[marks] = counts
    return np.repeat(found, repeats).tolist()


def name_of(video: Video) -> str:
    """What a video is called in messages."""
    value = video.value.get("path") if isinstance(video.value, Mapping) else video.value
    return f"video {value}" if isinstance(value, str) else "video from frames"


def _read(cv2: Any, capture: Any, number: int, earliest: int) -> tuple[np.ndarray | None, int]:
    """Frame `number`, or the last readable one before it that is not before `earliest`; None where there is none."""
    for at in range(number, earliest - 1, -1):
        capture.set(cv2.CAP_PROP_POS_FRAMES, at)
        done, frame = capture.read()
        if done:
            return cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), at
    return None, number


def _seconds(frames: _Frames, count: int) -> list[float]:
    """The mean time of the first and last frame of each group; the last frame fills the last group."""
    numbers = np.array(frames.numbers, float)
    each = -(-len(numbers) // count)
    numbers = np.pad(numbers, (0, each * count - len(numbers)), mode="edge").reshape(count, each)
    return ((numbers[:, 0] + numbers[:, -1]) / 2 / frames.rate).tolist()


def _content(file: Any) -> bytes:
    content = file.read_bytes() if isinstance(file, Path) else file
    return content if isinstance(content, bytes) else content.tobytes()
