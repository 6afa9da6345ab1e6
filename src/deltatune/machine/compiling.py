"""Keeps mx.compile from building kernels on CPUs and NVIDIA GPUs; it still compiles a step into one graph.

mx.compile fuses elementwise chains into kernels that it builds at first use, about a hundred for a hybrid model's
step. On a CPU, g++ needs 35 to 60 s of one core for them on a machine that has not built them before, and an iteration
becomes 5 to 10 % faster. On NVIDIA GPUs, NVRTC needs minutes in every process, since it builds each kernel for 34
layouts and keeps none (docs/decisions/nvidia-step.md). MLX has a compile mode that traces and simplifies but does not
fuse. It has no Python binding, so upstream.py finds the C++ function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from .. import upstream
from . import backend

_depth = 0


def compiles() -> bool:
    """Find out whether mx.compile has an effect: a call, MLX_DISABLE_COMPILE or a missing compiler may disable it."""
    calls = 0

    def count_call(x: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return x + 1

    function = mx.compile(count_call)
    for _ in range(2):
        function(mx.zeros(1))
    return calls == 1


@contextmanager
def not_compiled() -> Iterator[None]:
    """Let functions that mx.compile has made run operation by operation inside a `with` block, and restore its mode."""
    if not compiles():
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()
        do_not_fuse = upstream.set_no_fuse() if _depth else None
        if do_not_fuse is not None:
            do_not_fuse()


@contextmanager
def without_kernels() -> Iterator[str]:
    """Keep mx.compile from building kernels inside a `with` block, which gets `compiled ...` or `not compiled ...`.

    On Metal, and if this MLX lacks the compile mode, mx.compile stays as it is. Blocks may be nested: the end of the
    outermost one restores mx.compile.
    """
    global _depth
    if not compiles():
        yield "not compiled (mx.compile is off)"
        return
    do_not_fuse = None if backend.device() == "metal" else upstream.set_no_fuse()
    if do_not_fuse is None:
        yield "compiled"
        return
    do_not_fuse()
    _depth += 1
    try:
        yield "compiled (operations are not fused)"
    finally:
        _depth -= 1
        if _depth == 0:
            mx.enable_compile()
