"""Files that are there wholly, or not at all, whatever ends this process and whatever others do there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write(temporary)` make a file beside `path`, then put it there in one move: the old one, or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        # Where the folder itself cannot be entered, the error on its way out says so.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def replace_durably(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace `path` by what `write` puts into a file, so that it survives a power cut; folders to it are made.

    Raises OSError where the disk refuses.
    """

    def written_out(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, written_out)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes) -> None:
    """Put `data` at `path`, with the folders to it. Raises OSError where they cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda temporary: temporary.write_bytes(data))
