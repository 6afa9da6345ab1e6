"""Prepares MLX when deltatune is imported: its environment variables, its BLAS, its CPU thread.

A fault of the machine is an exception for a program that imports deltatune. The command line keeps it instead, so that
--help and --version still work, and every command ends with the one message.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..errors import UserError, first_line
from . import blas, environment, subnormals
from .command_line import is_command_line

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
        with subnormals.flushed():
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

    An entry None in sys.modules would do the same in one line. But packages such as datasets and SciPy import whatever
    has an entry there, and that import would then fail.
    """
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is not None:
        sys.meta_path[:] = [_WithoutTorch(finder) for finder in sys.meta_path]


def _start_mlx() -> None:
    try:
        subnormals.start_mlx()
    except ImportError as error:
        # The package mlx alone holds no library for Linux: the extras bring one for each kind of device.
        lacks = re.match(r"(?!libmlx)(lib\w+)\S*: cannot open", str(error))
        system = f" If {lacks[1]} is the system's, install it there: on Debian, libblas3 and liblapack3." if lacks else ""
        raise MissingBackendError(
            f"MLX cannot be loaded ({first_line(error)}). Install it for your device: on Linux "
            "pip install 'deltatune[cpu]', or for NVIDIA GPUs 'deltatune[cuda13]' or 'deltatune[cuda12]'; on macOS "
            f"pip install --force-reinstall mlx.{system}"
        ) from error
