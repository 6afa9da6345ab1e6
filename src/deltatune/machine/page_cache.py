"""Keeps files that are read again and again out of the system's page cache, so that other programs keep theirs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# F_GLOBAL_NOCACHE of macOS's <sys/fcntl.h>, which Python's fcntl does not name: nobody's reading of the file is cached.
_GLOBAL_NOCACHE = 55
# How many objects of this process want a file uncached, by its device and inode: the setting belongs to the file, so
# the last of them alone may take it back.
_WANTED_BY: Counter[tuple[int, int]] = Counter()


class PageCache:
    """What the system holds of some files in memory.

    Args:
        files: The files. On macOS they are not cached while this object lives.
    """

    def __init__(self, files: Sequence[Path]):
        self._open = [os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) for file in files]
        if sys.platform == "darwin":
            for descriptor in self._open:
                _WANTED_BY[_identity(descriptor)] += 1
                _set_uncached(descriptor, 1)

    def drop(self) -> None:
        """Let the system forget what it holds of the files. Linux alone has to be told each time."""
        if hasattr(os, "posix_fadvise"):
            for descriptor in self._open:
                # A file system in memory has no such cache, and some others refuse the advice.
                with contextlib.suppress(OSError):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Let the files be cached again, unless another object of this process wants them uncached."""
        for descriptor in self._open:
            if sys.platform == "darwin":
                _WANTED_BY[_identity(descriptor)] -= 1
                if not _WANTED_BY[_identity(descriptor)]:
                    _set_uncached(descriptor, 0)
            os.close(descriptor)
        self._open = []


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _set_uncached(descriptor: int, value: int) -> None:
    import fcntl

    # A file system that has no such setting refuses it, which costs nothing but its cache.
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, _GLOBAL_NOCACHE, value)
