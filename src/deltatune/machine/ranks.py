"""Prints each message of a launched run once: rank 0 prints its own, and another rank those that rank 0 did not.

Ranks that end or warn may never meet in a message of MLX again, so they read rank 0's messages from a file, which the
ranks that a launcher started on one machine share. A rank that reads nothing there prints its own message, with its
number.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TextIO

from ..errors import UserError
from .atomic_files import write
from .environment import cache_directory
from .wrapping import for_stream

# The rank among all of a run, as mlx.launch and Open MPI set it.
_NUMBERS = ("MLX_RANK", "OMPI_COMM_WORLD_RANK")
# Seconds: for rank 0 to say the same; between looks at its file; and the age of a file that another run left.
WAIT, _LOOK, _OLD = 10.0, 0.05, 600.0
_ERROR = "error"
_started = time.time()


def number() -> int | None:
    """Return the rank of this process, or None where no launcher has started it."""
    return next((int(value) for name in _NUMBERS if (value := os.environ.get(name, "")).isdigit()), None)


def say_error(message: str, everywhere: bool | None = None) -> None:
    """Write the message with which this process ends to standard error, unless rank 0 says it.

    `everywhere` tells whether every rank ends with this error; where it is None, this rank waits for rank 0's message.
    """
    rank = number()
    if rank == 0:
        note(_ERROR, message)
    elif rank is not None and everywhere is not False:
        # A launcher stops the other ranks when one ends, so this one stays until rank 0 has spoken, in any case.
        heard = _wait_for_error()
        if everywhere or message in heard:
            return
    write_own(message, rank)


def write_own(message: str, rank: int | None) -> None:
    """Write a message to standard error, with its rank if that is not 0."""
    name = f"rank {rank}: " if rank else ""
    sys.stderr.write(for_stream(f"{name}{message}", sys.stderr) + "\n")
    sys.stderr.flush()


def _wait_for_error() -> set[str]:
    """Return the errors of rank 0, as soon as there is one; an empty set if there is none for WAIT seconds."""
    until = time.monotonic() + WAIT
    while not (errors := {text for kind, text in said() if kind == _ERROR}) and time.monotonic() < until:
        time.sleep(_LOOK)
    return errors


def _path() -> Path:
    """Return the file of the ranks that were started by this process's parent with these words."""
    words = hashlib.blake2b(json.dumps([sys.argv, os.getcwd()]).encode(), digest_size=8).hexdigest()
    return cache_directory() / "ranks" / f"{os.getppid()}-{words}.json"


def note(kind: str, text: str) -> None:
    """Add a message of rank 0 to its file; where there can be none, the other ranks print their own messages."""
    with contextlib.suppress(OSError, UserError):
        path = _path()
        write(path, json.dumps([*said(), (kind, text)]).encode())
        for other in path.parent.glob("*.json"):
            if other.stat().st_mtime < time.time() - _OLD:
                other.unlink(missing_ok=True)


def said() -> list[tuple[str, str]]:
    """Return the messages of rank 0 of this run so far."""
    with contextlib.suppress(OSError, UserError, ValueError):
        path = _path()
        # The number of a launcher's process may be that of one that ended long ago.
        if path.stat().st_mtime > _started - WAIT:
            return [(kind, text) for kind, text in json.loads(path.read_bytes())]
    return []


class Warnings(logging.Handler):
    """Writes warnings to standard error once: those of Python's module, and those of the loggers of deltatune.

    A rank other than 0 keeps its own until rank 0 has had time to say the same.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._waiting: list[str] = []
        self._changed = threading.Lock()

    def install(self) -> None:
        """Replace the writer of warnings in this process, which a launcher has started."""

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            self._say(warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n"))

        warnings.showwarning = show
        logger = logging.getLogger(__name__.partition(".")[0])
        logger.addHandler(self)
        logger.propagate = False
        atexit.register(self._flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a logger's message."""
        self._say(self.format(record))

    def _say(self, text: str) -> None:
        if number() == 0:
            note("warning", text)
            print(text, file=sys.stderr, flush=True)
            return
        with self._changed:
            self._waiting.append(text)
        timer = threading.Timer(WAIT, self._flush)
        timer.daemon = True
        timer.start()

    def _flush(self) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, []
        of_rank_0 = {text for _, text in said()} if waiting else set()
        for text in waiting:
            if text not in of_rank_0:
                write_own(text, number())
