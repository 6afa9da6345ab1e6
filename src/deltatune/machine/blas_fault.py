"""Whether the BLAS under MLX computes products of one row, or leaves in them what stood in the output before.

MLX's CPU products hand sgemm an output that nobody has written, with beta = 0, which means: do not read it. Some
versions of Apple's Accelerate read it all the same when M = 1 and B is off 64-byte alignment, where MLX's allocator
always puts it; a NaN left there by an earlier owner of the memory stays (mlx issue 3200, pull request 3563).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS, INNER = 512, 544
# MLX's CPU allocator keeps the size before the data: 8 bytes off any alignment that malloc gives.
_OFF = 8
_BOUND = 1e-5
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112

Multiply = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """One call of sgemm: rows of A, bytes that B is off alignment, and what C holds before."""

    name: str
    rows: int
    off: int
    before: float


FAULT = Case("one row", 1, _OFF, np.nan)
TWO_ROWS = Case("two rows", 2, _OFF, np.nan)
CASES = (
    FAULT,
    Case("one row, C zero", 1, _OFF, 0.0),
    Case("one row, C finite", 1, _OFF, 3.0),
    Case("one row, B aligned", 1, 0, np.nan),
    TWO_ROWS,
)


@dataclass(frozen=True)
class ProbeResult:
    """What the probe found: names of the cases that came out wrong; `library` is None where no sgemm is to be found."""

    library: str | None
    wrong: tuple[str, ...] = ()

    @property
    def faulty(self) -> bool:
        """Whether a one-row product may come out wrong."""
        return any(case.name in self.wrong for case in CASES if case.rows == 1)

    @property
    def mendable(self) -> bool:
        """Whether two rows come out right, so that one row can be computed as two."""
        return TWO_ROWS.name not in self.wrong

    def __str__(self) -> str:
        if self.library is None:
            return "MLX's sgemm was not found, so it was not probed"
        if not self.wrong:
            return f"{self.library} computes them right, whatever the output held before"
        return f"{self.library} computes these wrong: {'; '.join(self.wrong)}"


@cache
def probe() -> ProbeResult:
    """The verdict on the sgemm that MLX calls in this process. Some milliseconds, once."""
    found = _symbol()
    return ProbeResult(None) if found is None else examine(*found)


def examine(multiply: Multiply, library: str) -> ProbeResult:
    """The verdict on `multiply`, a cblas_sgemm of `library`."""
    wrong = [case.name for case in CASES if not (_right(multiply, case, False) and _right(multiply, case, True))]
    return ProbeResult(library, tuple(wrong))


def _right(multiply: Multiply, case: Case, transposed: bool) -> bool:
    random = np.random.default_rng(0)
    a = _place((case.rows, INNER), _OFF)
    a[:] = random.standard_normal(a.shape)
    b = _place((COLUMNS, INNER) if transposed else (INNER, COLUMNS), case.off)
    b[:] = random.standard_normal(b.shape)
    c = _place((case.rows, COLUMNS), _OFF)
    c[:] = case.before
    sizes = (_ROW_MAJOR, _PLAIN, _TRANSPOSED if transposed else _PLAIN, case.rows, COLUMNS, INNER)
    multiply(*sizes, 1.0, a.ctypes.data, INNER, b.ctypes.data, b.shape[1], 0.0, c.ctypes.data, COLUMNS)
    expected = a.astype(np.float64) @ (b.T if transposed else b).astype(np.float64)
    return bool((np.abs(c - expected) <= _BOUND * np.abs(expected).max()).all())


def _place(shape: tuple[int, int], off: int) -> np.ndarray:
    """An fp32 matrix that starts `off` bytes after a multiple of 64."""
    count = shape[0] * shape[1]
    memory = np.zeros(4 * count + 128, np.uint8)
    start = -memory.ctypes.data % 64 + off
    return memory[start : start + 4 * count].view(np.float32).reshape(shape)


def _symbol() -> tuple[Multiply, str] | None:
    """The cblas_sgemm that libmlx is bound to, and the file that it is in."""
    found = _accelerate() if sys.platform == "darwin" else _loaded()
    if found is None:
        return None
    integer, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    found.argtypes = [integer] * 6 + [real, pointer, integer, pointer, integer, real, pointer, integer]
    found.restype = None
    return found, _file(found)


def _accelerate() -> Any | None:
    """MLX is built against the new LAPACK interface of Accelerate, whose symbols carry a suffix (macOS 13.3)."""
    library = ctypes.CDLL("/System/Library/Frameworks/Accelerate.framework/Accelerate")
    return getattr(library, "cblas_sgemm$NEWLAPACK", None) or getattr(library, "cblas_sgemm", None)


def _loaded() -> Any | None:
    """As the linker resolves it for libmlx: what is loaded for everybody first, then the libraries that it names."""
    import mlx.core as mx

    paths = [None, *Path(str(mx.__file__)).parent.glob("lib/libmlx.so")]
    for place in paths:
        function = getattr(ctypes.CDLL(None if place is None else str(place)), "cblas_sgemm", None)
        if function is not None:
            return function
    return None


class _Location(ctypes.Structure):
    """dladdr's answer (Dl_info)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file(function: Any) -> str:
    """The file that `function` lives in."""
    location = _Location()
    lookup = ctypes.CDLL(None).dladdr
    lookup.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Location)]
    known = lookup(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(location))
    return location.file.decode() if known and location.file else "an unknown file"
