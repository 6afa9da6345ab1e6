"""Keeps often read files out of the system's page cache, for other programs, and measures how fast the disk is read."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Of macOS's <sys/fcntl.h>, which Python's fcntl does not name: nobody's reading of a file is cached, or not the reading
# through one descriptor.
_GLOBAL_NOCACHE, _NOCACHE = 55, 48


class PageCache:
    """The pages of some files that the system keeps in memory. On macOS none is cached while this object lives."""

    def __init__(self, files: Sequence[Path]):
        self._open = [os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) for file in files]
        for descriptor in self._open:
            _set(descriptor, _GLOBAL_NOCACHE, 1)

    def drop(self) -> None:
        """Drop the files' pages from the page cache. Only Linux needs this each time."""
        for descriptor in self._open:
            drop(descriptor)

    def close(self) -> None:
        """Let the files be cached again."""
        for descriptor in self._open:
            _set(descriptor, _GLOBAL_NOCACHE, 0)
            os.close(descriptor)
        self._open = []


def drop(descriptor: int) -> None:
    """Drop an open file's pages from Linux's page cache."""
    if hasattr(os, "posix_fadvise"):
        # A file system in memory has no such cache, and some others refuse the advice.
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def read_uncached(descriptor: int) -> None:
    """Let macOS cache nothing that is read through a descriptor; the file's own setting stays as it is."""
    _set(descriptor, _NOCACHE, 1)


def _set(descriptor: int, command: int, value: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        # A file system that has no such setting refuses it, which costs nothing but its cache.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, command, value)


# MLX reads a file by four threads, in pieces of about this size.
_THREADS, _PIECE = 4, 16 * 2**20
# A small file is known well when it has been read so often.
_TIMES = 16


def disk_rate(file: Path, seconds: float = 1.0, *, cached: bool = False) -> float:
    """Return how many bytes of `file` arrive a second, read at random places past the page cache or through it.

    It reads for `seconds`, unless all of the file has been read several times before.
    """
    size = file.stat().st_size
    draw = random.Random(0)
    with open(file, "rb", buffering=0) as source:
        if not cached:
            read_uncached(source.fileno())
        started, read = time.monotonic(), 0
        pieces = [bytearray(min(_PIECE, size)) for _ in range(_THREADS)]
        with ThreadPoolExecutor(_THREADS) as pool:
            while not read or ((passed := time.monotonic() - started) < seconds and read < _TIMES * size):
                if not cached:
                    drop(source.fileno())
                places = [draw.randint(0, size - len(piece)) for piece in pieces]
                read += sum(pool.map(lambda piece, at: os.preadv(source.fileno(), [piece], at), pieces, places))
                passed = time.monotonic() - started
    return read / passed
