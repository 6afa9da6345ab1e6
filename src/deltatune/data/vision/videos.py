"""Opens the videos of a data set: files, of which frames are taken evenly, or lists of frames."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import UserError
from ...models.vision.inputs import Picture, VisionSpec
from .image_files import file_content, image_file, media_path, open_image, shown
from .images import processed_picture
from .video_files import Frames, read_frames

# The sampling of Qwen3-VL's processors, used where the model's own processor does not define it.
_SAMPLING = {"fps": 2.0, "min_frames": 4, "max_frames": 768}


@dataclass(frozen=True, eq=False)
class Video:
    """A video as a row gives it: a path or a list of frames, and its frames per second if the row says them."""

    value: Any
    fps: float | None = None


class Clip(NamedTuple):
    """The patches of a video, and the time of each pair of its frames, in seconds."""

    picture: Picture
    seconds: list[float]


@dataclass(frozen=True, eq=False)
class VideoReader:
    """Turns a video of a row into patches; relative paths begin at `folder`.

    `limits` are min_pixels and max_pixels of a frame; the model's own limit for a whole video holds as well. `fps` is
    the frames per second to take from a file, or at which a list of frames was recorded, and `max_frames` the most to
    take; None takes the processor's own.
    """

    processor: Any
    folder: Path
    limits: Mapping[str, int]
    fps: float | None = None
    max_frames: int | None = None

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
        sizes = sorted({f"{frame.shape[1]}x{frame.shape[0]}" for frame in frames.pixels})
        if len(sizes) > 1:
            raise UserError(
                f"{source}: {name_of(video)}: frames of {' and '.join(sizes[:3])} pixels; expected one size."
            )
        try:
            processed = self._limited(len(frames.pixels))(videos=[np.stack(frames.pixels)], do_sample_frames=False)
        except (ValueError, TypeError) as error:
            raise UserError(f"{source}: {name_of(video)}: the model's video processor refuses it: {error}.") from error
        picture = processed_picture(processed["pixel_values_videos"], processed["video_grid_thw"])
        return Clip(picture, _seconds(frames.times, picture.grid[0]))

    def digest(self, video: Video, source: str) -> bytes:
        """Return a digest of the video, by which a resumed run recognises its data."""
        if isinstance(content := self._source(video, source), Path):
            with content.open("rb") as file:
                return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
        total = hashlib.blake2b(digest_size=16)
        for frame in content:
            total.update(file_content(image_file(frame, self.folder, source)))
        return total.digest()

    def _frames(self, video: Video, source: str) -> Frames:
        content = self._source(video, source)
        limit = int(self._sampling("max_frames", self.max_frames))
        rate = self._sampling("fps", video.fps or self.fps)
        if isinstance(content, Path):
            least = int(self._sampling("min_frames", None))
            return read_frames(
                content,
                f"{source}: {name_of(video)}",
                lambda total, recorded: frame_count(total, recorded, rate, least, limit),
            )
        numbers = list(range(len(content)))
        if len(content) > limit:
            numbers = np.linspace(0, len(content) - 1, limit).round().astype(int).tolist()
        opened = []
        for number in numbers:
            where = f"{source}: frame {number + 1} of a video"
            opened.append(np.asarray(open_image(image_file(content[number], self.folder, where), where)))
        return Frames(opened, [number / rate for number in numbers])

    def _source(self, video: Video, source: str) -> Path | Sequence[Any]:
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
        """Return a sampling option: the user's, else the processor's own, else Qwen3-VL's."""
        return asked or getattr(self.processor, name, None) or _SAMPLING[name]

    def _limited(self, frames: int) -> Any:
        if not self.limits:
            return self.processor
        limited = copy.copy(self.processor)
        if "min_pixels" in self.limits:
            limited.min_pixels = self.limits["min_pixels"] * frames
        if "max_pixels" in self.limits:
            limited.max_pixels = min(limited.max_pixels, self.limits["max_pixels"] * frames)
        return limited


def frame_count(total: int, rate: float, fps: float, least: int, most: int) -> int:
    """Return how many of a file's `total` frames to take, at `fps` of its `rate` frames per second, from `least` to
    `most`.

    The number is even if the file has two frames or more, as by smart_nframes of qwen_vl_utils and
    mlx_vlm.utils.load_video.
    """
    highest = min(most, total) // 2 * 2
    count = min(max(total / rate * fps, math.ceil(least / 2) * 2), highest, total)
    return max(int(count) // 2 * 2, min(total, 1))


def video_names(tokenizer: Any, spec: VisionSpec) -> tuple[str, str, str]:
    """Return the tokens that `video_text` needs, as the tokenizer writes them."""
    start, token, end = tokenizer.convert_ids_to_tokens([spec.start_token, spec.video_token, spec.end_token])
    return start, token, end


def video_text(seconds: Sequence[float], names: tuple[str, str, str]) -> str:
    """Return the text that stands for a video in a prompt: for each pair of frames, its time and a block of tokens.

    The tokens are those of video_names(). That of a feature is written once here and repeated after tokenisation, as
    Qwen3VLProcessor of transformers and of mlx-vlm does.
    """
    return "".join(f"<{at:.1f} seconds>{''.join(names)}" for at in seconds)


def name_of(video: Video) -> str:
    """Return the name of a video in messages."""
    value = video.value.get("path") if isinstance(video.value, Mapping) else video.value
    return f"video {shown(value)}" if isinstance(value, str) else "video from frames"


def _seconds(times: Sequence[float], count: int) -> list[float]:
    """Return the mean time of the first and last frame of each of `count` groups, padding with the last frame.

    The order of operations, which decides the last digit, is that of Qwen3VLProcessor in transformers.
    """
    size = -(-len(times) // count)
    padded = [*times, *[times[-1]] * (size * count - len(times))]
    return [(padded[first] + padded[first + size - 1]) / 2 for first in range(0, len(padded), size)]
