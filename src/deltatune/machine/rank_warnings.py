"""Prints once the warnings that every rank of a launched run has."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import warnings
from typing import TextIO

from . import ranks


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
        if ranks.number() == 0:
            ranks.note("warning", text)
            print(text, file=sys.stderr, flush=True)
            return
        with self._changed:
            self._waiting.append(text)
        timer = threading.Timer(ranks.WAIT, self._flush)
        timer.daemon = True
        timer.start()

    def _flush(self) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, []
        said = {text for _, text in ranks.said()} if waiting else set()
        for text in waiting:
            if text not in said:
                ranks.write_own(text, ranks.number())
