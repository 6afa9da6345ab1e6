"""Puts a checksum into a safetensors file as it is written, and compares it with the file's content.

The checksum lies in the header's metadata, so that every reader of safetensors still reads the file. It covers all
bytes of the file, with its own digits taken as zeros. It is meant to find damage, not forgery.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import xxhash

# The metadata holds BLANK under KEY until the digest is known.
KEY = "checksum"
_KIND, _DIGITS = "xxh3-128:", 32
BLANK = _KIND + "0" * _DIGITS
# Both writers, MLX's and tensor_files.py, begin the file with the metadata.
_START = 1 << 16
_PIECE = 1 << 22


class DamagedFileError(ValueError):
    """Raised for a file with content that does not fit the checksum in it."""


class SummedFile:
    """A binary file that sums a safetensors file, written from start to end with BLANK under KEY in its metadata."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._digest = xxhash.xxh3_128()
        self._start = b""

    def write(self, data: bytes) -> int:
        """Append `data`."""
        self._digest.update(data)
        if len(self._start) < _START:
            self._start += bytes(data[: _START - len(self._start)])
        return self._file.write(data)

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move in the file, as MLX's writer does before it starts."""
        return self._file.seek(offset, whence)

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def seal(self) -> None:
        """Replace BLANK in the metadata by the checksum of the written bytes."""
        self._file.seek(self._start.index(BLANK.encode()))
        self._file.write(_KIND.encode() + self._digest.hexdigest().encode())
        self._file.seek(0, 2)


def check(path: Path) -> bool:
    """Return whether a file holds a checksum; DamagedFileError where its content does not fit that."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        start = file.read(_START)
        # One damaged byte cannot hide both marks.
        if f'"{KEY}":'.encode() not in start and _KIND.encode() not in start:
            return False
        before, mark, after = start.partition(f'"{KEY}":"{_KIND}'.encode())
        stored = after[:_DIGITS]
        digest.update(before + mark + b"0" * len(stored) + after[_DIGITS:])
        while piece := file.read(_PIECE):
            digest.update(piece)
    if stored != digest.hexdigest().encode():
        raise DamagedFileError("its content does not fit its checksum")
    return True
