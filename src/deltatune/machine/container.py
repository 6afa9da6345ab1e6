"""Reads how much memory a container may take and how much it takes, from either version of Linux's control groups."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

#: Where Linux shows the control groups of this process.
CGROUPS = Path("/sys/fs/cgroup")
# Of versions 2 and 1: the limit, the usage, and the files' pages in `memory.stat`, which are given back on demand.
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"),
)


class Container(NamedTuple):
    """The memory of a container, in bytes.

    Attributes:
        limit: The container's limit.
        left: The memory left, with pages of files given back; the limit where the usage is unknown.
    """

    limit: int
    left: int


def container(root: Path = CGROUPS) -> Container | None:
    """Return the memory of this process's container; None without one, and where it has no limit."""
    containers = [_read(root, *files) for files in _FILES]
    return min(filter(None, containers), key=lambda one: one.limit, default=None)


def _read(root: Path, limit: str, used: str, statistics: str, cached: str) -> Container | None:
    try:
        most = (root / limit).read_text().strip()
    except OSError:
        return None
    # Version 2 says `max` where there is no limit; version 1 says a number larger than any machine's memory.
    if not most.isdigit():
        return None
    try:
        taken = int((root / used).read_text())
        files = re.search(rf"^{cached} (\d+)", (root / statistics).read_text(), re.M)
    except OSError:
        return Container(int(most), int(most))
    return Container(int(most), int(most) - taken + int(files[1] if files else 0))
