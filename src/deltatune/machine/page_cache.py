"""Keeps often read files out of the system's page cache, so that other programs keep theirs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
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
