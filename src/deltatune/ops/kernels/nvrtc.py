"""NVIDIA's runtime compiler, the library that MLX links: it compiles CUDA C++ text to machine code."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from ...machine import nvidia

# For each release of CUDA, the folders of NVIDIA's packages that hold the library and the headers.
_RELEASES = {13: ("cu13", "cu13"), 12: ("cuda_nvrtc", "cuda_runtime")}


def compiled(text: str, name: str, architecture: str) -> bytes:
    """Compile CUDA C++ text to a cubin for an architecture such as sm_90a; messages call the text `name`.

    RuntimeError has the compiler's message, or says that it is not installed.
    """
    return compiled_with_report(text, name, architecture)[0]


def compiled_with_report(text: str, name: str, architecture: str) -> tuple[bytes, str]:
    """Compile a kernel; return the cubin, and the assembler's report: registers, spills, and warnings of slow code.

    Arguments and errors are those of `compiled`.
    """
    program = ctypes.c_void_p()
    _call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        options = [f"--gpu-architecture={architecture}", "--device-as-default-execution-space", "--disable-warnings"]
        options += [f"--include-path={_headers()}", "--ptxas-options=-v"]
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = _library().nvrtcCompileProgram(program, len(options), arguments)
        log = _read("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if failed:
            raise RuntimeError(f"{name} does not compile for {architecture}: {log}")
        return _read("nvrtcGetCUBIN", program), log
    finally:
        _library().nvrtcDestroyProgram(ctypes.byref(program))


def version() -> tuple[int, int]:
    """Return the compiler's version as (major, minor)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@cache
def _library() -> ctypes.CDLL:
    names = {f"libnvrtc.so.{release}": inner for release, (inner, _) in _RELEASES.items()}
    paths = [*names, *nvidia.packaged(names)]
    # A library that is already loaded comes first: MLX links it, so the driver can load the code that it compiles.
    library = nvidia.library(paths, os.RTLD_NOLOAD) or nvidia.library(paths)
    if library is not None:
        return library
    raise RuntimeError(
        f"NVIDIA's runtime compiler was not found: expected one of {', '.join(names)}, which MLX links. "
        "Install deltatune with its CUDA packages: pip install 'deltatune[cuda13]' (or cuda12)."
    )


@cache
def _headers() -> Path:
    release = version()[0]
    roots = [folder / _RELEASES[release][1] for folder in nvidia.packages() if release in _RELEASES]
    roots += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots.append(Path("/usr/local/cuda"))
    for root in roots:
        if (root / "include" / "cuda_bf16.h").is_file():
            return root / "include"
    raise RuntimeError(
        f"CUDA's headers were not found: expected include/cuda_bf16.h in one of {', '.join(map(str, roots))}. "
        "Set CUDA_HOME to the folder of a CUDA toolkit."
    )


def _read(name: str, program: ctypes.c_void_p) -> bytes:
    length = ctypes.c_size_t()
    _call(f"{name}Size", program, ctypes.byref(length))
    buffer = ctypes.create_string_buffer(length.value)
    _call(name, program, buffer)
    return buffer.raw


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} of NVIDIA's runtime compiler failed with code {status}.")
