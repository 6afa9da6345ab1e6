"""Makes MLX's CPU threads treat numbers under 1e-38 as zero.

On Intel's CPUs such subnormal numbers cost a hundred cycles and more each, on AMD's a few, and a training step is full
of them: products of gates, second moments of small gradients. MLX leaves them on. A thread inherits the processor's
setting from the one that starts it, so it is set while MLX starts its CPU thread, and then put back for Python and
NumPy.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# glibc's fenv_t on x86-64: 28 bytes of x87 state, then MXCSR; its bits for flush-to-zero and subnormals-are-zero.
_FENV_BYTES = 32
_MXCSR = slice(28, 32)
_FLUSH = 0x8040


def _costly() -> bool:
    """Whether they may cost much here. All of x86-64 is treated alike, so that every such CPU gives the same bits."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"


@contextmanager
def flushed() -> Iterator[None]:
    """Within it this thread, and those it starts, treat subnormal numbers as zero; a no-op where they cost nothing."""
    if not _costly():
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
    """Have MLX start its CPU thread now, inside flushed(); too late, and left alone, where mlx was imported before."""
    if _costly() and "mlx.core" not in sys.modules:
        import mlx.core as mx

        mx.eval(mx.add(mx.array(1.0), mx.array(1.0), stream=mx.cpu))
