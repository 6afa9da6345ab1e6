"""Breaks texts into the lines of a terminal, between words."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO


def wrapped(text: str, width: int) -> str:
    """Return `text` with its lines broken between words; a word that is longer than `width` has a line of its own."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip(" ")))
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        ) or [""]
    return "\n".join(lines)


def for_stream(text: str, stream: TextIO) -> str:
    """Return `text` as `stream` is to get it: in lines that fit if it is a terminal, else as it is."""
    return wrapped(text, shutil.get_terminal_size().columns) if stream.isatty() else text


def say(text: str, stream: TextIO | None = None) -> None:
    """Print `text` on `stream`, on standard output where none is given, as for_stream returns it."""
    stream = sys.stdout if stream is None else stream
    print(for_stream(text, stream), file=stream, flush=True)
