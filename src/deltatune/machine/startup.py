"""Prepares MLX when deltatune is imported: its environment variables, its BLAS, its CPU thread.

A fault of the machine is an exception for a program that imports deltatune. The command line keeps it instead, so that
--help and --version still work, and every command ends with the one message.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..errors import UserError, first_line
from . import blas, environment
from .command_line import is_command_line

# glibc's fenv_t on x86-64 is 28 bytes of x87 state, then MXCSR. _FLUSH is MXCSR's bits FTZ and DAZ.
_FENV_BYTES = 32
_MXCSR = slice(28, 32)
_FLUSH = 0x8040

_problem: UserError | None = None


class MissingBackendError(UserError, ImportError):
    """MLX cannot be imported; the message names the extras of deltatune that install it for a device."""


def prepare(implementations: Mapping[str, tuple[str, ...]]) -> None:
    """Prepare MLX, unused so far, with the implementations that each operator's variable may force.

    UserError for a variable of unknown value and MissingBackendError if MLX cannot be imported, neither if this process
    is the command line.
    """
    global _problem
    try:
        environment.check(implementations)
        environment.keep_full_fp32()
        environment.limit_queue()
        environment.see_own_gpu()
        # MLX's CPU thread inherits the handling of subnormal numbers, and the BLAS, from the moment at which it starts.
        with _flushed():
            blas.load()
            if not is_command_line():
                blas.warn()
            environment.keep_numpy_in_one_thread()
            _start_mlx()
    except UserError as error:
        if not is_command_line():
            # The lines of a traceback would stand before the remedy.
            sys.stderr.write(f"deltatune: {error}\n")
            raise
        _problem = error


def check(implementations: Mapping[str, tuple[str, ...]]) -> None:
    """Raise the error that `prepare` kept, or one for a variable set since to an unknown value; warn of a slow BLAS."""
    if _problem is not None:
        raise _problem
    environment.check(implementations)
    blas.warn()


def leave_torch_out(*, own_process: bool = False) -> None:
    """Let nothing in this process import PyTorch, if it is the command line or, as `own_process` says, a child of it.

    Where PyTorch is installed, transformers imports it together with itself, which takes seconds (tens of seconds from
    a cold disk). mlx-lm and mlx-vlm read tokenizers and images without it. Another program, tasks of lm-eval and code
    of a checkpoint may need PyTorch, so commands that run them do not call this.
    """
    if "torch" not in sys.modules and (own_process or is_command_line()):
        hide_torch()
        # transformers would advise to install PyTorch.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class _WithoutTorch:
    """A finder in sys.meta_path that finds all modules of another one, except PyTorch."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if name == "torch" else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        # importlib.metadata and importlib.invalidate_caches ask finders for more.
        return getattr(self._finder, name)


def hide_torch() -> None:
    """Let imports of PyTorch fail, and importlib.util.find_spec return None for it; do nothing if it is imported.

    An entry None in sys.modules would not do: packages such as datasets and SciPy import whatever has one.
    """
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is not None:
        sys.meta_path[:] = [_WithoutTorch(finder) for finder in sys.meta_path]


def _may_be_slow() -> bool:
    # All x86-64 CPUs are treated alike, so that they give the same bits.
    return sys.platform == "linux" and platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"


@contextmanager
def _flushed() -> Iterator[None]:
    """Inside the `with` block, this thread and those it starts treat subnormal numbers (below about 1e-38) as zero.

    One operation on a subnormal number costs a hundred cycles or more on Intel's CPUs and a few on AMD's, and a
    training step has many: products of gates, second moments of small gradients. A thread inherits the processor's
    setting from the thread that starts it, so MLX's CPU thread keeps this one, and Python and NumPy get theirs back.
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


def _start_mlx() -> None:
    """Import MLX and make it start its CPU thread, inside _flushed(); if MLX is imported, nothing happens."""
    if "mlx.core" in sys.modules:
        return
    try:
        import mlx.core as mx
    except ImportError as error:
        # The package mlx alone holds no library for Linux: the extras bring one for each kind of device.
        lacks = re.match(r"(?!libmlx)(lib\w+)\S*: cannot open", str(error))
        system = f" If {lacks[1]} is the system's, install it there (Debian: libblas3, liblapack3)." if lacks else ""
        raise MissingBackendError(
            f"MLX cannot be loaded ({first_line(error)}). Install it for your device: on Linux "
            "pip install 'deltatune[cpu]', or for NVIDIA GPUs 'deltatune[cuda13]' or 'deltatune[cuda12]'; on macOS "
            f"pip install --force-reinstall mlx.{system}"
        ) from error
    if _may_be_slow():
        mx.eval(mx.add(mx.array(1.0), mx.array(1.0), stream=mx.cpu))
