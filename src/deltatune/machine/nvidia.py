"""Reads the limits of the NVIDIA GPU that MLX computes on, which decide how kernels are launched."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

# These are CUdevice_attribute values of CUDA's cuda.h.
_BLOCK_BYTES, _MULTIPROCESSORS = 97, 16
# The kernels use bulk copies, barriers that count bytes, and matrix stores, which came with Hopper.
HOPPER = 90


@dataclass(frozen=True)
class Limits:
    """The limits of a GPU.

    Attributes:
        block_bytes: The most shared memory that one thread block may use, in bytes.
        multiprocessors: The number of multiprocessors, which is how many such blocks run at once.
    """

    block_bytes: int
    multiprocessors: int


H200 = Limits(227 * 1024, 132)


@cache
def limits() -> Limits:
    """Return the limits that the driver reports; those of an H200 without a driver, as on a machine that only plans."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return H200
    if driver.cuInit(0):
        return H200
    values = []
    for attribute in (_BLOCK_BYTES, _MULTIPROCESSORS):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0):
            return H200
        values.append(value.value)
    return Limits(*values)


@cache
def generation() -> int:
    """Return the compute capability times ten: 90 for Hopper. It is HOPPER if MLX reports none."""
    name = str(mx.device_info(mx.gpu).get("architecture", ""))
    return int(name.removeprefix("sm_")) if name.startswith("sm_") else HOPPER
