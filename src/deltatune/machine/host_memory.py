"""Says how much main memory is free, in a container too, and keeps arrays there that an NVIDIA GPU reads."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from . import backend, nvidia

_MEMINFO = Path("/proc/meminfo")
#: The numbers of an array that bytes_of() copies off a GPU at a time.
PIECE_NUMBERS = 1 << 25
#: Where Linux shows the control groups of this process.
CGROUPS = Path("/sys/fs/cgroup")
# Of versions 2 and 1: the limit, the usage, and the files' pages in `memory.stat`, which are given back on demand.
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"),
)


class Container(NamedTuple):
    """A container's memory in bytes: its limit, and that left with pages of files given back, all if unknown."""

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


def free(meminfo: Path = _MEMINFO, cgroups: Path = CGROUPS) -> int | None:
    """Return the bytes that programs may still take, of the machine and of the container; None where nobody says."""
    try:
        available = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.M)
    except OSError:
        return None
    if available is None:
        return None
    limited = container(cgroups)
    size = int(available[1]) * 1024
    return size if limited is None else min(size, limited.left)


def stay(arrays: list[mx.array]) -> bool:
    """Advise NVIDIA's driver that computed arrays stay in the host's memory, from which the GPU reads them.

    Without the advice, the driver moves arrays that a GPU reads into the GPU's memory. Returns whether it took the
    advice.
    """
    for array in arrays:
        # NumPy has no bf16.
        data = as_numpy(array.view(mx.uint16) if array.itemsize == 2 else array)
        if not nvidia.stays_on_host(data.ctypes.data, data.nbytes):
            return False
    return True


class _Usage(ctypes.Structure):
    """struct rusage_info_v0 of macOS's <sys/resource.h>."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("times_and_wakeups", ctypes.c_uint64 * 5),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("footprint", ctypes.c_uint64),
        ("start_and_exit", ctypes.c_uint64 * 2),
    )


def memory_of(process: int) -> int:
    """Return the bytes of the footprint of a process of this user on macOS, which refuses no process any memory.

    Compressed pages are included. It is 0 if the process has ended, and on other systems.
    """
    if sys.platform != "darwin":
        return 0
    usage = _Usage()
    refused = ctypes.CDLL("/usr/lib/libSystem.B.dylib").proc_pid_rusage(process, 0, ctypes.byref(usage))
    return 0 if refused else int(usage.footprint)


def as_numpy(array: mx.array) -> np.ndarray:
    """Return the numbers of an array, which must not be bf16, once they are computed; they are not to be changed.

    np.array() and memoryview() ask MLX for a buffer. If the numbers cannot be copied off an NVIDIA GPU then, MLX ends
    the process: nothing can be saved, and no message names a remedy. Here that is a RuntimeError.
    """
    numbers: Any = array
    return numbers.__array__()


def bytes_of(array: mx.array) -> Iterator[np.ndarray]:
    """Yield the bytes of an array in pieces, in their order; the array stays in the memory where it is.

    An array that the host reads is moved by MLX out of an NVIDIA GPU's memory for the rest of its life: into memory
    that the driver moves to and fro, so that a full GPU waits for weights at each use. So the host reads copies.
    """
    flat = array.reshape(-1)
    for start in range(0, flat.size, PIECE_NUMBERS):
        piece = flat[start : start + PIECE_NUMBERS].view(mx.uint8)
        # mx.contiguous() would share the array's memory.
        yield as_numpy(mx.where(mx.array(True), piece, piece) if backend.has_own_memory() else piece)
