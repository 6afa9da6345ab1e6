"""Locks a file for one process at a time. The system ends the lock with the process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import TextIO

# POSIX locks are used because forked processes do not inherit them, and because network file systems know them. They
# do not exclude the process itself, and closing the file anywhere in it ends them: so files are known by their inode.
_held: set[tuple[int, int]] = set()
# The errors of file systems without locks.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

# How often a lock is tried while its file is replaced by others who take it and give it back.
_TRIES = 100


class HeldError(Exception):
    """Raised if another holder has the lock; the message names it."""


class FileLock:
    """A lock on a file, into which its holder writes who it is.

    Args:
        path: The file, which is made, with its folders, when the lock is taken. It is removed when the lock is given
            back, and so are folders that were made for it and are empty.

    Attributes:
        path: The file; whoever renames its folder sets it anew.
        supported: Whether the file system has locks; if it has none, taking the lock excludes nobody.
    """

    def __init__(self, path: Path):
        self.path, self.supported = path, True
        self._file: TextIO | None = None
        self._made: list[Path] = []

    def acquire(self) -> None:
        """Take the lock. HeldError if another process, or another FileLock of this one, has it.

        OSError if the file cannot be made, or the file system gives it another number each time it is asked.
        """
        folders = [folder for folder in (self.path.parent, *self.path.parent.parents) if not folder.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._made = folders
        if not any(self._try() for _ in range(_TRIES)):
            raise OSError(errno.ESTALE, "the file is another one each time it is opened", str(self.path))

    def release(self) -> None:
        """Give the lock back, if it was taken."""
        if self._file is None:
            return
        # The file goes before the lock does, so that whoever opened it meanwhile sees that its lock counts no more.
        self.path.unlink(missing_ok=True)
        _held.discard(_identity(self._file))
        self._file.close()
        self._file = None
        self._remove_folders()

    def _try(self) -> bool:
        """Take the lock; return False if the file was replaced meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            status = self.path.stat()
            if (status.st_dev, status.st_ino) in _held:
                raise HeldError("this process")
        file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 (closed by release)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                holder = _holder(file.read())
                file.close()
                raise HeldError(holder) from error
            if error.errno not in _UNSUPPORTED:
                file.close()
                raise
            self.supported = False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                self._file = file
                _held.add(_identity(file))
                self._sign(file)
                return True
        file.close()
        return False

    def _sign(self, file: TextIO) -> None:
        """Write who holds the lock; it is given back where the file system refuses."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = {"process": os.getpid(), "machine": socket.gethostname(), "since": since}
        try:
            os.truncate(file.fileno(), 0)
            # Without a buffer, which closing the file would try to write once more.
            os.write(file.fileno(), json.dumps(holder).encode())
        except OSError:
            self.release()
            raise

    def _remove_folders(self) -> None:
        # A folder that is not empty stays.
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()
        self._made = []


def _identity(file: TextIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _holder(text: str) -> str:
    """Describe the holder of a lock from its entry in the file, which may be incomplete."""
    try:
        content = json.loads(text)
        return f"process {content['process']} on {content['machine']}, since {content['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
