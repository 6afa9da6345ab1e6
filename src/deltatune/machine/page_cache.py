"""Keeps files that are read again and again out of the system's page cache, so that other programs keep theirs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# F_GLOBAL_NOCACHE of macOS's <sys/fcntl.h>, which Python's fcntl does not name: nobody's reading of the file is cached.
_GLOBAL_NOCACHE = 55


class PageCache:
    """What the system holds of some files in memory.

    Args:
        files: The files. On macOS they are not cached while this object lives.
    """

    def __init__(self, files: Sequence[Path]):
        self._open = [os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) for file in files]
        if sys.platform == "darwin":
            self._set_uncached(1)

    def drop(self) -> None:
        """Let the system forget what it holds of the files. Linux alone has to be told each time."""
        if hasattr(os, "posix_fadvise"):
            for descriptor in self._open:
                # A file system in memory has no such cache, and some others refuse the advice.
                with contextlib.suppress(OSError):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Let the files be cached again."""
        if sys.platform == "darwin":
            self._set_uncached(0)
        for descriptor in self._open:
            os.close(descriptor)
        self._open = []

    def _set_uncached(self, value: int) -> None:
        import fcntl

        for descriptor in self._open:
            # A file system that has no such setting refuses it, which costs nothing but its cache.
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, _GLOBAL_NOCACHE, value)
