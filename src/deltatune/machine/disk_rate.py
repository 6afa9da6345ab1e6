"""Measures how fast this machine reads a file from its disk."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import page_cache

# MLX reads a file by four threads, in pieces of about this size.
_THREADS, _PIECE = 4, 16 * 2**20
# A small file is known well when it has been read so often.
_TIMES = 16


def measured(file: Path, seconds: float = 1.0, *, cached: bool = False) -> float:
    """Return how many bytes of `file` arrive a second, read at random places past the page cache or through it.

    It reads for `seconds`, unless all of the file has been read several times before.
    """
    size = file.stat().st_size
    draw = random.Random(0)
    with open(file, "rb", buffering=0) as source:
        if not cached:
            page_cache.read_uncached(source.fileno())
        started, read = time.monotonic(), 0
        pieces = [bytearray(min(_PIECE, size)) for _ in range(_THREADS)]
        with ThreadPoolExecutor(_THREADS) as pool:
            while not read or ((passed := time.monotonic() - started) < seconds and read < _TIMES * size):
                if not cached:
                    page_cache.drop(source.fileno())
                places = [draw.randint(0, size - len(piece)) for piece in pieces]
                read += sum(pool.map(lambda piece, at: os.preadv(source.fileno(), [piece], at), pieces, places))
                passed = time.monotonic() - started
    return read / passed
