"""Writes files atomically: a reader sees the old file or the complete new one, even if this process is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[Path], object], keep: Path | None = None) -> None:
    """Replace `path`, in a folder that exists, by the file that `write` makes at the temporary path beside it.

    The replaced file is moved to `keep` once the new one is complete. A kill between the two moves leaves it there, and
    no file at `path`.
    """
    # Two threads may write one file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        write(temporary)
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
    except OSError as error:
        # A message names the file that was asked for.
        if error.filename == str(temporary):
            error.filename = str(path)
        raise
    finally:
        # If the folder itself cannot be entered, the exception that is already being raised says so.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def replace_durably(path: Path, write: Callable[[BinaryIO], object], keep: Path | None = None) -> None:
    """Replace `path` atomically by what `write` puts into an open file, so that the file survives a power cut.

    Missing folders are created; `keep` is as in replace_file. May raise OSError.
    """

    def write_and_flush(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            flush(file.fileno())

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, write_and_flush, keep)
    sync_directory(path.parent)


def flush(descriptor: int) -> None:
    """Flush an open file to the disk, so that its content survives a power cut; OSError where the file system refuses.

    On macOS fsync leaves the content in the drive's own memory, and F_FULLFSYNC does not. A file system that lacks
    F_FULLFSYNC, as those of network drives do, gets fsync.
    """
    if sys.platform == "darwin":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_directory(directory: Path) -> None:
    """Flush the entries of `directory` to the disk, so that a rename in it survives a power cut.

    Some network file systems cannot, and answer that a folder is no file; such an answer is ignored.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        flush(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes) -> None:
    """Replace `path` atomically by a file that holds `data`; missing folders are created. May raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda temporary: temporary.write_bytes(data))
