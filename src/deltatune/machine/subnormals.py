"""Makes MLX's CPU thread treat subnormal numbers (below about 1e-38) as zero.

One operation on a subnormal number costs a hundred cycles or more on Intel's CPUs and a few on AMD's, and a training
step has many of them: products of gates, second moments of small gradients. MLX does not turn them off. A thread
inherits the processor's setting from the thread that starts it. So the setting is changed while MLX starts its CPU
thread, and then restored for Python and NumPy.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# glibc's fenv_t on x86-64 is 28 bytes of x87 state, then MXCSR. _FLUSH is MXCSR's bits FTZ and DAZ.
_FENV_BYTES = 32
_MXCSR = slice(28, 32)
_FLUSH = 0x8040


def _may_be_slow() -> bool:
    # All x86-64 CPUs are treated alike, so that they give the same bits.
    return sys.platform == "linux" and platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"


@contextmanager
def flushed() -> Iterator[None]:
    """Inside the `with` block, this thread and those it starts treat subnormal numbers as zero.

    The block changes nothing except on Linux with glibc on x86-64.
    """
    if not _may_be_slow():
        yield
        return
    libm = ctypes.CDLL("libm.so.6")
    before = (ctypes.c_uint8 * _FENV_BYTES)()
    libm.fegetenv(before)
    changed = bytearray(before)
    changed[_MXCSR] = (int.from_bytes(changed[_MXCSR], "little") | _FLUSH).to_bytes(4, "little")
    libm.fesetenv((ctypes.c_uint8 * _FENV_BYTES).from_buffer(changed))
    try:
        yield
    finally:
        libm.fesetenv(before)


def start_mlx() -> None:
    """Import MLX and make it start its CPU thread; call it inside flushed(). If mlx is imported, nothing happens."""
    if "mlx.core" in sys.modules:
        return
    import mlx.core as mx

    if _may_be_slow():
        mx.eval(mx.add(mx.array(1.0), mx.array(1.0), stream=mx.cpu))
