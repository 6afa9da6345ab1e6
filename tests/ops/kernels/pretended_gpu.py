"""An NVIDIA GPU that this machine lacks: its kernels are compiled, and their launches recorded."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from deltatune.machine import nvidia
from deltatune.ops.gated_delta import fused_hopper
from deltatune.ops.gated_delta.tiling import choose_tiling
from deltatune.ops.kernels import builds, cubin, fatbin, launch, nvrtc

AMPERE, HOPPER, BLACKWELL = "sm_80", "sm_90a", "sm_100a"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Pretend that MLX runs on an NVIDIA GPU of `architecture`: launches are recorded, cubins go to a new folder.

    `fast`: the compiler takes half the time and optimises little, but for kernels of Hopper's own instructions.
    """
    pretended = SimpleNamespace(architecture=HOPPER, launches=[], compiled=[], reports=[], folder=tmp_path, fast=False)
    library = nvrtc._library

    def precompiled(**given: Any) -> list[mx.array]:
        pretended.launches.append(given)
        return [mx.zeros(*kind) for kind in zip(given["output_shapes"], given["output_dtypes"], strict=True)]

    def compiled(text: str, name: str, architecture: str) -> bytes:
        pretended.compiled.append(name)
        fast = pretended.fast and "_hopper_" not in name and nvrtc.version() >= (13, 0)
        monkeypatch.setattr(nvrtc, "_library", (lambda: _Fast(library())) if fast else library)
        code, report = nvrtc.compiled_with_report(text, name, architecture)
        pretended.reports.append((name, report))
        return code

    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(launch, "_machine", lambda: "cuda")
    monkeypatch.setattr(cubin, "architecture", lambda: pretended.architecture)
    monkeypatch.setattr(nvidia, "generation", lambda: int("".join(filter(str.isdigit, pretended.architecture))))
    monkeypatch.setattr(nvrtc, "compiled", compiled)
    # The tests look at the code itself.
    monkeypatch.setattr(fatbin, "_library", lambda: None)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", precompiled)
    forget_kernels()
    yield pretended
    forget_kernels()


class _Fast:
    """NVIDIA's compiler, told to take little time."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def nvrtcCompileProgram(self, program: ctypes.c_void_p, count: int, options: Any) -> int:  # noqa: N802
        more = (ctypes.c_char_p * (count + 1))(*options, b"--Ofast-compile=max")
        return self._library.nvrtcCompileProgram(program, count + 1, more)


def forget_kernels() -> None:
    """Let the next call build its kernels anew; tilings and plans hold the launches that were made with them."""
    builds.forget()
    for name, module in sys.modules.items():
        if name.startswith("deltatune.ops.") and hasattr(module, "_plan"):
            module._plan.cache_clear()
    for remembered in (launch.kernel_of, choose_tiling, fused_hopper._tiling):
        remembered.cache_clear()
