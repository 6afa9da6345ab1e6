"""Tells how much memory another process of the same user has, on macOS, which refuses no process any memory."""

from __future__ import annotations

import ctypes
import sys


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
    """Return the bytes of a process's footprint, compressed pages included; 0 if it has ended, and on other systems."""
    if sys.platform != "darwin":
        return 0
    usage = _Usage()
    refused = ctypes.CDLL("/usr/lib/libSystem.B.dylib").proc_pid_rusage(process, 0, ctypes.byref(usage))
    return 0 if refused else int(usage.footprint)
