"""Writes small videos: frames at any times, in any container."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

# The number of bars in a numbered frame, one for each bit of its number.
BITS = 8


def write_video(
    path: Path,
    frames: Sequence[np.ndarray],
    *,
    codec: str = "libx264",
    rate: int = 10,
    stamps: Sequence[int] | None = None,
    **options: str,
) -> None:
    """Write frames uint8 [H, W, 3], frame k at k / rate seconds or at stamps[k] milliseconds."""
    import av

    time_base = Fraction(1, rate) if stamps is None else Fraction(1, 1000)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = {"mjpeg": "yuvj420p", "gif": "rgb8"}.get(codec, "yuv420p")
        stream.options = options
        stream.codec_context.time_base = time_base
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number if stamps is None else stamps[number]
            frame.time_base = time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def numbered(count: int) -> list[np.ndarray]:
    """Return frames [48, 64, 3] that show their numbers in bars."""
    frames = np.full((count, 48, 64, 3), 16, np.uint8)
    for number in range(count):
        for bit in range(BITS):
            if number >> bit & 1:
                frames[number, 8:40, 8 * bit + 1 : 8 * bit + 7] = 235
    return list(frames)


def number_of(frame: np.ndarray) -> int:
    """Return the number that a frame of `numbered` shows."""
    return sum(int(frame[16:32, 8 * bit + 3 : 8 * bit + 5].mean() > 125) << bit for bit in range(BITS))
