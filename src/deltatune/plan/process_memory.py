"""Reads this process's own memory; a wrong address raises an exception in place of a crash."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable

Read = Callable[[int, int], bytes]


class LayoutError(Exception):
    """The loaded MLX stores its arrays in a way that deltatune does not know."""


class UnreadableError(LayoutError):
    """The address is not mapped, or this system has no way to read it safely."""


def reader() -> Read:
    """A function (address, size) -> bytes, which raises UnreadableError where nothing is mapped."""
    if sys.platform == "linux":
        return _linux()
    if sys.platform == "darwin":
        return _darwin()
    raise UnreadableError(f"no safe way to read memory is known on {sys.platform}")


def _linux() -> Read:
    try:
        file = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UnreadableError(f"/proc/self/mem cannot be opened: {error.strerror}") from error
    closing = _Closing(file)

    def read(address: int, size: int) -> bytes:
        try:
            content = os.pread(closing.file, size, address)
        except (OSError, OverflowError) as error:
            raise UnreadableError(f"nothing at {address:#x}") from error
        if len(content) != size:
            raise UnreadableError(f"nothing at {address:#x}")
        return content

    return read


class _Closing:
    """A file descriptor that is closed when its last user is gone."""

    def __init__(self, file: int):
        self.file = file

    def __del__(self) -> None:
        os.close(self.file)


def _darwin() -> Read:
    # mach/mach_vm.h: kern_return_t mach_vm_read_overwrite(task, address, size, data, out size).
    system = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    task = ctypes.c_uint.in_dll(system, "mach_task_self_").value
    call = system.mach_vm_read_overwrite
    call.argtypes = [ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]

    def read(address: int, size: int) -> bytes:
        content, done = ctypes.create_string_buffer(size), ctypes.c_uint64(0)
        if call(task, address, size, ctypes.addressof(content), ctypes.addressof(done)) or done.value != size:
            raise UnreadableError(f"nothing at {address:#x}")
        return content.raw

    return read


def words(data: bytes) -> tuple[int, ...]:
    """`data` as unsigned integers of 8 bytes."""
    return struct.unpack(f"<{len(data) // 8}Q", data)
