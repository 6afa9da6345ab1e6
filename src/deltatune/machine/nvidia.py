"""What plans of kernels need to know of MLX's NVIDIA GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

# From CUDA's cuda.h.
_BLOCK_BYTES, _MULTIPROCESSORS = 97, 16
# The first generation with copies in bulk, barriers that count their bytes, and stores of tiles.
HOPPER = 90


@dataclass(frozen=True)
class Limits:
    """Bytes of shared memory that a block may ask for; how many blocks of that size run at once."""

    block_bytes: int
    multiprocessors: int


H200 = Limits(227 * 1024, 132)


@cache
def limits() -> Limits:
    """As the driver says; an H200's where there is none to ask, as on a machine that only plans."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return H200
    if driver.cuInit(0):
        return H200
    found = []
    for attribute in (_BLOCK_BYTES, _MULTIPROCESSORS):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0):
            return H200
        found.append(value.value)
    return Limits(*found)


@cache
def generation() -> int:
    """Its compute capability times ten: 90 for Hopper. HOPPER where MLX names none."""
    name = str(mx.device_info(mx.gpu).get("architecture", ""))
    return int(name.removeprefix("sm_")) if name.startswith("sm_") else HOPPER
