"""On CPUs and NVIDIA GPUs: compile a step as one graph, without building kernels for it.

mx.compile fuses elementwise chains into kernels that it builds at first use, about a hundred for a hybrid model's
step. With g++, on a CPU, that is 35 to 60 s of one core on a machine that has not built them yet, for 5 to 10 % an
iteration; with NVRTC, minutes in every process, since each is built for 34 layouts and none is kept (docs/log.md). MLX
has a mode that traces and simplifies but does not fuse; Python has no binding for it.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from . import backend

# mlx/compile.h: void set_compile_mode(CompileMode), enum class CompileMode {disabled, no_simplify, no_fuse, enabled}.
_SYMBOL = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"
_NO_FUSE = 2

_depth = 0


def _library() -> ctypes.CDLL | None:
    """libmlx, if it lies where the Linux wheels have it and exports what is needed."""
    spec = importlib.util.find_spec("mlx")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "lib" / "libmlx.so"
        if path.is_file():
            library = ctypes.CDLL(str(path))
            return library if hasattr(library, _SYMBOL) else None
    return None


def compiles() -> bool:
    """Whether mx.compile is in force: not disabled by a call, by MLX_DISABLE_COMPILE, or for want of a compiler."""
    calls = 0

    def counted(x: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return x + 1

    function = mx.compile(counted)
    for _ in range(2):
        function(mx.zeros(1))
    return calls == 1


@contextmanager
def without_kernels() -> Iterator[str]:
    """Within it, mx.compile builds no kernels. Gives what a step will be: `compiled ...` or `not compiled`.

    On Metal, and where this MLX cannot do it, mx.compile stays as it is. Nests; the outermost exit ends it.
    """
    global _depth
    if not compiles():
        yield "not compiled (mx.compile is off)"
        return
    library = None if backend.device() == "metal" else _library()
    if library is None:
        yield "compiled"
        return
    library[_SYMBOL](_NO_FUSE)
    _depth += 1
    try:
        yield "compiled, without kernels of its own"
    finally:
        _depth -= 1
        if _depth == 0:
            mx.enable_compile()
