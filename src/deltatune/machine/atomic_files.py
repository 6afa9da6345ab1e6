"""Files that are there wholly, or not at all, whatever ends this process and whatever others do there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write(temporary)` make a file beside `path`, then put it there in one move: the old one, or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, data: bytes) -> None:
    """Put `data` at `path`, with the folders to it. Raises OSError where they cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda temporary: temporary.write_bytes(data))
