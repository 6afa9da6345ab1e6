"""Opens the videos of a data set: files, of which frames are taken evenly, or lists of frames."""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ...errors import UserError, first_line
from ...models.vision.inputs import Picture, VisionSpec
from .images import file_content, image_file, media_path, open_image, processed_picture, shown

# The number of frames at its end that a sound file may count in its header and not hold.
_MISCOUNTED = 3
# The elements with which a Matroska or WebM file begins; the second holds everything behind its size.
_MATROSKA_HEADER = b"\x1a\x45\xdf\xa3"
_MATROSKA_SEGMENT = b"\x18\x53\x80\x67"


@dataclass(frozen=True, eq=False)
class Frames:
    """Frames of a video, uint8 [H, W, 3] each, and the time of each in seconds."""

    pixels: list[np.ndarray]
    times: list[float]


@dataclass(frozen=True, eq=False)
class _Timeline:
    """When the frames of a file are shown: `stamps` [N], in seconds from the first, in this order.

    `rate` is frames per second, the mean of them unless it is `constant`: frame k is then shown at k / rate. `origin`
    is the first frame's time stamp; None if the file has no time stamps in the order of its frames.
    """

    stamps: np.ndarray
    rate: float
    constant: bool
    origin: int | None

    def spread(self, count: int) -> np.ndarray:
        """Return `count` times from the first frame to the last; frames of a constant rate are taken by number."""
        if self.constant:
            return np.linspace(0, len(self.stamps) - 1, count).round() / self.rate
        return np.linspace(0, self.stamps[-1], count)

    @property
    def tolerance(self) -> float:
        """How much later than a time, in seconds, the frame that is shown then may be stamped."""
        return 0.5 / self.rate if self.constant else 1e-6


def read_frames(path: Path, named: str, count_of: Callable[[int, float], int]) -> Frames:
    """Read evenly spaced frames of a file: at each time the one that a player shows then.

    The file is decoded from its beginning, because containers such as transport streams have no index of frames, and a
    seek in them lands elsewhere. `count_of` tells how many frames to take, of the file's number of frames and its
    frames per second. A UserError says that PyAV is missing, or that the file is no video, damaged or of a codec that
    cannot be decoded.
    """
    try:
        import av
    except ImportError as error:
        raise UserError(
            f"{named}: reading video files needs PyAV: pip install av; or give a list of frames."
        ) from error
    try:
        # FFmpeg would read "a:b" as a protocol and its argument.
        with av.open(f"file:{path}") as container:
            timeline = _timeline(container, _video_stream(container, named), path, named)
        times = timeline.spread(count_of(len(timeline.stamps), timeline.rate))
        with av.open(f"file:{path}") as container:
            pixels = _shown(_decoded(container, av.error.InvalidDataError), timeline, times, named)
    except av.error.FFmpegError as error:
        raise UserError(
            f"{named}: no video, truncated or damaged, or of a format that FFmpeg does not read "
            f"({first_line(error)}); give another file."
        ) from error
    return Frames(pixels, times.tolist())


def _video_stream(container: Any, named: str) -> Any:
    """Return the stream of a container that is its video; UserError if there is none that can be decoded."""
    stream = container.streams.best("video") or next(iter(container.streams.video), None)
    if stream is None:
        raise UserError(f"{named}: no video in the file; give another file.")
    if stream.codec_context is None:
        raise UserError(
            f"{named}: PyAV has no decoder for the file's codec; install a build of PyAV that has it, or write the "
            "video anew, for instance with ffmpeg -i VIDEO -c:v libx264 NEW.mp4."
        )
    return stream


def _timeline(container: Any, stream: Any, path: Path, named: str) -> _Timeline:
    """Read the time stamps of all frames from the packets, without decoding; UserError if the file is cut off."""
    packets = [packet for packet in container.demux(stream) if packet.size and not packet.is_discard]
    stated = float(stream.average_rate or stream.guessed_rate or 1)
    tick = float(stream.time_base or 0)
    # A stream that was cut out of a broadcast begins with frames that refer to missing frames.
    first = next((number for number, packet in enumerate(packets) if packet.is_keyframe), 0)
    written = [packet.pts for packet in packets[first:]]
    if not written:
        raise UserError(f"{named}: a video without frames; give another file.")
    if None in written:
        stamps = np.arange(len(written)) / stated
        origin = None
    else:
        readable = np.array(sorted(pts for pts in written if pts >= written[0]), np.int64)
        stamps = (readable - readable[0]) * tick
        # AVI stamps frames in the order of decoding: the k-th frame to be shown then has the k-th stamp.
        reordered = stream.codec_context.has_b_frames and written == sorted(written)
        origin = None if reordered else int(readable[0])
    total = len(stamps)
    short = stream.frames - len(packets) > _MISCOUNTED
    ends_early = stream.duration is None or stamps[-1] < stream.duration * tick - (1 + _MISCOUNTED) / stated
    if (short and ends_early) or _is_cut_off(path):
        raise UserError(f"{named}: truncated or damaged: it ends after frame {total}; replace the file.")
    if np.abs(stamps - np.arange(total) / stated).max() <= min(tick, 0.5 / stated) or stamps[-1] == 0:
        return _Timeline(stamps, stated, True, origin)
    return _Timeline(stamps, float((total - 1) / stamps[-1]), False, origin)


def _decoded(container: Any, invalid: type[Exception]) -> Iterator[Any]:
    """Decode the frames of a container in the order in which they are shown.

    `invalid` is PyAV's error for data that are no frame, which may stand before a stream's first frame.
    """
    stream = container.streams.best("video") or container.streams.video[0]
    stream.thread_type = "AUTO"
    begun = False
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except invalid:
            if begun:
                raise
            continue
        begun = begun or bool(frames)
        yield from frames


def _shown(frames: Iterator[Any], timeline: _Timeline, times: np.ndarray, named: str) -> list[np.ndarray]:
    """Return the pixels of the frame that is shown at each of the times, which rise."""
    taken: list[np.ndarray] = []
    shown = None
    shown_at = 0.0
    for number, frame in enumerate(frames):
        if timeline.origin is None or frame.pts is None:
            at = float(timeline.stamps[min(number, len(timeline.stamps) - 1)])
        else:
            at = float((frame.pts - timeline.origin) * frame.time_base)
        if at < 0:
            continue
        while shown is not None and len(taken) < len(times) and at > times[len(taken)] + timeline.tolerance:
            taken.append(_pixels(shown))
        if len(taken) == len(times):
            return taken
        shown, shown_at = frame, at
    if shown is None or shown_at < timeline.stamps[-1 - min(_MISCOUNTED, len(timeline.stamps) - 1)]:
        raise UserError(
            f"{named}: truncated or damaged: nothing after {shown_at:.2f} s can be decoded; replace the file."
        )
    return taken + [_pixels(shown)] * (len(times) - len(taken))


def _pixels(frame: Any) -> np.ndarray:
    """Return a frame in RGB, turned as the file says: telephones write every video lying."""
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90))


def _is_cut_off(path: Path) -> bool:
    """Whether a Matroska or WebM file is shorter than it says: its frames are not counted anywhere else.

    RFC 8794, section 6, defines the size of an element, and RFC 9559, section 4, the file.
    """
    with path.open("rb") as file:
        if file.read(4) != _MATROSKA_HEADER:
            return False
        file.seek(_element_size(file) or 0, os.SEEK_CUR)
        if file.read(4) != _MATROSKA_SEGMENT:
            return False
        size = _element_size(file)
        return size is not None and file.tell() + size > path.stat().st_size


def _element_size(file: BinaryIO) -> int | None:
    """Read the size of an element; its first byte gives the size's own length. None if the size is unknown."""
    first = file.read(1)
    length = 9 - first[0].bit_length() if first else 0
    bits = 7 * length
    size = int.from_bytes(first + file.read(max(length - 1, 0)), "big") & ((1 << bits) - 1)
    return None if size == (1 << bits) - 1 else size


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
