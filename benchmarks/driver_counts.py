"""Says what the memory on an NVIDIA card is, as MLX and as the driver count it, while a program runs."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import mlx.core as mx

from deltatune.machine import nvidia

# CUmemPool_attribute of CUDA's cuda.h: what the pool has of the card, and what of that is handed out.
RESERVED, USED = 5, 7


class DriverCounts:
    """Looks often, in a thread, at what MLX's pool of memory holds, and keeps the moment of the most."""

    def __init__(self) -> None:
        driver, pool = nvidia.library(["libcuda.so.1"]), ctypes.c_void_p()
        assert driver is not None
        if driver.cuInit(0) or driver.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0):
            raise SystemExit("NVIDIA's driver names no pool of memory.")
        self._driver: Any = driver
        self._pool, self._most = pool, (0, 0, 0, 0)
        self._at_first = self._free = nvidia.free_memory() or 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _attribute(self, kind: int) -> int:
        value = ctypes.c_uint64()
        self._driver.cuMemPoolGetAttribute(self._pool, ctypes.c_int(kind), ctypes.byref(value))
        return value.value

    def _watch(self) -> None:
        while True:
            time.sleep(0.01)
            seen = self._attribute(RESERVED), self._attribute(USED), mx.get_active_memory(), mx.get_cache_memory()
            self._most = max(self._most, seen)
            self._free = min(self._free, nvidia.free_memory() or 0)

    def said(self) -> str:
        """Return the counts at the moment of the most since the last call, in GB.

        `taken` is the most that the card's free memory has fallen, and `free` the least of it, contexts included.
        """
        (reserved, used, active, cached), self._most = self._most, (0, 0, 0, 0)
        free, self._free = self._free, nvidia.free_memory() or 0
        parts = {"pool": reserved, "handed out": used, "MLX active": active, "MLX cache": cached}
        parts |= {"taken": self._at_first - free, "free": free}
        return ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
