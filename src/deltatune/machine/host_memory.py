"""Says how much of the host's main memory is free, and keeps arrays there that an NVIDIA GPU reads."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx

from . import nvidia
from .container import CGROUPS, container
from .numpy_arrays import as_numpy

_MEMINFO = Path("/proc/meminfo")


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
