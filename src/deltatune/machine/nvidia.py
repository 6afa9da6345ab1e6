"""Finds NVIDIA's driver and libraries, and the limits of the GPU that MLX computes on."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

# These are CUdevice_attribute values of CUDA's cuda.h.
_BLOCK_BYTES, _MULTIPROCESSORS = 97, 16
# CUmem_advise: where memory should lie, and that the GPU reads it there. CUmemLocationType: a GPU, the host.
_PREFERRED, _ACCESSED_BY = 3, 5
_ON_DEVICE, _ON_HOST = 1, 2
# Flags of cuMemHostAlloc: memory for every context, at an address that the GPU uses as well.
_FOR_ALL = 1 | 2
# The kernels use bulk copies, barriers that count bytes, and matrix stores, which came with Hopper.
HOPPER = 90


@dataclass(frozen=True)
class Limits:
    """The shared memory in bytes that a GPU's thread block may use, and how many such blocks run at once."""

    block_bytes: int
    multiprocessors: int


H200 = Limits(227 * 1024, 132)


@cache
def limits() -> Limits:
    """Return the limits that the driver reports; those of an H200 without a driver, as on a machine that only plans."""
    driver = _driver()
    if driver is None or driver.cuInit(0):
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


@cache
def driver_version() -> tuple[int, int]:
    """Return the newest CUDA release that the driver supports, as (major, minor); (0, 0) without a driver."""
    driver, version = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)):
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def free_memory() -> int | None:
    """Return the bytes of the GPU's memory that no program has taken; None where the driver does not say."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with _in_context() as driver:
        if driver is None or driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
            return None
    return free.value


def give_back() -> None:
    """Wait for the GPU, and give other uses the memory that the driver keeps for arrays and that none has.

    The driver keeps memory freed in a stream until the host has waited for it, and MLX waits for none in which it
    frees.
    """
    pool = ctypes.c_void_p()
    with _in_context() as driver:
        if driver is not None and not driver.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0):
            driver.cuCtxSynchronize()
            driver.cuMemPoolTrimTo(pool, ctypes.c_size_t(0))


@contextmanager
def _in_context() -> Iterator[ctypes.CDLL | None]:
    """Yield the driver, which then asks the GPU of this process; None where it refuses."""
    driver = _driver()
    context = ctypes.c_void_p()
    refused = driver is None or driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    if driver is None or refused or driver.cuCtxPushCurrent_v2(context):
        yield None
        return
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(0)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


def stays_on_host(address: int, size: int) -> bool:
    """Advise the driver to leave managed memory on the host, where the GPU reads it; return whether it took that.

    The function that is called came with CUDA 12.2.
    """
    advise = getattr(_driver(), "cuMemAdvise_v2", None)
    if advise is None:
        return False
    advice = ((_PREFERRED, _Location(_ON_HOST, 0)), (_ACCESSED_BY, _Location(_ON_DEVICE, 0)))
    return not any(advise(ctypes.c_uint64(address), ctypes.c_size_t(size), kind, where) for kind, where in advice)


def pinned(size: int) -> int | None:
    """Return the address of so many page-locked bytes of the host, which the GPU reads and writes; None if none."""
    driver, address = _driver(), ctypes.c_void_p()
    if driver is None or driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), _FOR_ALL):
        return None
    return address.value


def free_pinned(address: int) -> None:
    """Free memory from pinned()."""
    driver = _driver()
    if driver is not None:
        driver.cuMemFreeHost(ctypes.c_void_p(address))


def _driver() -> ctypes.CDLL | None:
    return library(["libcuda.so.1"])


def library(names: Iterable[str], mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL | None:
    """Return the first shared library of these names or paths that can be loaded, or None."""
    for name in names:
        try:
            return ctypes.CDLL(name, mode)
        except OSError:
            continue
    return None


def packaged(names: Mapping[str, str]) -> list[str]:
    """Return where NVIDIA's installed packages would hold libraries, of which `names` gives the package's folder."""
    return [str(folder / inner / "lib" / name) for folder in packages() for name, inner in names.items()]


def packages() -> list[Path]:
    """Return NVIDIA's folders among the installed packages."""
    spec = importlib.util.find_spec("nvidia")
    return [*map(Path, (spec.submodule_search_locations or ()) if spec else ())]
