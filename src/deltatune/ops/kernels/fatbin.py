"""Packs machine code into the compressed form that CUDA's driver unpacks when it loads a kernel.

MLX hashes a kernel's whole code at every launch (CustomKernel::eval_gpu in mlx/backend/cuda/custom_kernel.cpp), which
adds up to milliseconds of a training step. Packed code has a quarter to a third of the bytes.
"""

from __future__ import annotations

import ctypes
from functools import cache

from ...machine import nvidia

# The first driver, by its CUDA version, that unpacks zstd. Older ones know the format of mode `speed` alone.
_ZSTD = (12, 8)
# The first release of the library that packs in these modes.
_FIRST = (12, 6)
# For each release of CUDA, the folder of NVIDIA's packages that holds the library.
_RELEASES = {13: "cu13", 12: "nvfatbin"}


def packed(code: bytes, architecture: str) -> bytes:
    """Pack a cubin into a fat binary, or return it as it is where NVIDIA's library nvFatbin is missing or too old.

    `architecture` is the compiler's name, such as sm_90a. RuntimeError says that the library refuses the code. Source:
    https://docs.nvidia.com/cuda/nvfatbin
    """
    library = _library()
    if library is None:
        return code
    options = [b"-64", b"-compress-all", f"-compress-mode={mode()}".encode()]
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()
    arguments = (ctypes.c_char_p * len(options))(*options)
    _check(library.nvFatbinCreate(ctypes.byref(handle), arguments, ctypes.c_size_t(len(options))))
    try:
        version = architecture.removeprefix("sm_").encode()
        _check(library.nvFatbinAddCubin(handle, code, ctypes.c_size_t(len(code)), version, b"kernel"))
        _check(library.nvFatbinSize(handle, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        _check(library.nvFatbinGet(handle, buffer))
        return buffer.raw
    finally:
        library.nvFatbinDestroy(ctypes.byref(handle))


def mode() -> str:
    """Return how code is packed here: `size` or `speed` as nvFatbin calls them, or `none` without the library."""
    if _library() is None:
        return "none"
    return "size" if nvidia.driver_version() >= _ZSTD else "speed"


@cache
def _library() -> ctypes.CDLL | None:
    names = {f"libnvfatbin.so.{release}": inner for release, inner in _RELEASES.items()}
    library = nvidia.library([*nvidia.packaged(names), *names])
    major = ctypes.c_uint()
    minor = ctypes.c_uint()
    if library is None or library.nvFatbinVersion(ctypes.byref(major), ctypes.byref(minor)):
        return None
    return library if (major.value, minor.value) >= _FIRST else None


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVIDIA's library nvFatbin cannot pack a kernel: error {status}.")
