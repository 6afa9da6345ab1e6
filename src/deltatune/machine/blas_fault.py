"""Tests whether the BLAS that MLX calls computes matrix products of one row correctly.

MLX's CPU products give sgemm an uninitialised output buffer with beta = 0, so sgemm must not read it. Some versions of
Apple's Accelerate read it all the same if M = 1 and B is not aligned to 64 bytes, which is where MLX's allocator always
puts it. A NaN that an earlier owner of the memory left there then stays in the product (mlx issue 3200, pull request
3563). The doctor reports the result, and patches/tables/one_row_products.py acts on it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

COLUMNS, INNER = 512, 544
# MLX's CPU allocator stores the size before the data, so the data start 8 bytes after an address that malloc aligned.
_OFFSET = 8
_BOUND = 1e-5
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112

Multiply = Callable[..., None]


@dataclass(frozen=True)
class BlasCase:
    """One call of sgemm, C = A B: C is filled with `initial`, and B starts `offset` bytes after a multiple of 64."""

    name: str
    rows: int
    offset: int
    initial: float


FAULT = BlasCase("one row", 1, _OFFSET, np.nan)
TWO_ROWS = BlasCase("two rows", 2, _OFFSET, np.nan)
CASES = (
    FAULT,
    BlasCase("one row, C zero", 1, _OFFSET, 0.0),
    BlasCase("one row, C finite", 1, _OFFSET, 3.0),
    BlasCase("one row, B aligned", 1, 0, np.nan),
    TWO_ROWS,
)


@dataclass(frozen=True)
class ProbeResult:
    """The file of the sgemm that MLX calls, None if none was found, and the names of the cases with a wrong product."""

    library: str | None
    wrong: tuple[str, ...] = ()

    @property
    def faulty(self) -> bool:
        """Whether a product of one row may be wrong."""
        return any(case.name in self.wrong for case in CASES if case.rows == 1)

    @property
    def two_rows_work(self) -> bool:
        """Whether products of two rows are right, so that one row can be computed as two."""
        return TWO_ROWS.name not in self.wrong

    def __str__(self) -> str:
        if self.library is None:
            return "MLX's sgemm was not found, so it was not probed"
        if not self.wrong:
            return f"{self.library} computes products of one row correctly, whatever the output buffer held before"
        return f"{self.library} computes these products wrongly: {'; '.join(self.wrong)}"


@cache
def probe() -> ProbeResult:
    """Test the sgemm that MLX calls in this process. The first call takes some milliseconds."""
    located = _find_sgemm()
    return ProbeResult(None) if located is None else examine(*located)


def examine(multiply: Multiply, library: str) -> ProbeResult:
    """Test `multiply`, a cblas_sgemm of the file `library`, in all CASES, with B as it is and transposed."""
    random = np.random.default_rng(0)
    a = random.standard_normal((TWO_ROWS.rows, INNER), np.float32)
    b = random.standard_normal((INNER, COLUMNS), np.float32)
    # NumPy's `@` would wait for threads of an OpenBLAS of its own, for ever where ranks share too few cores.
    expected = np.einsum("ij,jk->ik", a, b, dtype=np.float64)
    wrong = [
        case.name
        for case in CASES
        if not all(_is_right(multiply, case, a, laid_out, expected) for laid_out in (b, np.ascontiguousarray(b.T)))
    ]
    return ProbeResult(library, tuple(wrong))


def _is_right(multiply: Multiply, case: BlasCase, a: np.ndarray, b: np.ndarray, expected: np.ndarray) -> bool:
    """Whether a case's product of its rows of `a` by `b` is the `expected`; a `b` of other sizes is transposed."""
    left = _matrix_at((case.rows, INNER), _OFFSET)
    left[:] = a[: case.rows]
    right = _matrix_at(b.shape, case.offset)
    right[:] = b
    c = _matrix_at((case.rows, COLUMNS), _OFFSET)
    c[:] = case.initial
    transposed = _PLAIN if b.shape == (INNER, COLUMNS) else _TRANSPOSED
    sizes = (_ROW_MAJOR, _PLAIN, transposed, case.rows, COLUMNS, INNER)
    multiply(*sizes, 1.0, left.ctypes.data, INNER, right.ctypes.data, b.shape[1], 0.0, c.ctypes.data, COLUMNS)
    return bool((np.abs(c - expected[: case.rows]) <= _BOUND * np.abs(expected).max()).all())


def _matrix_at(shape: tuple[int, int], offset: int) -> np.ndarray:
    """Allocate an fp32 matrix that starts `offset` bytes after a multiple of 64."""
    count = shape[0] * shape[1]
    memory = np.zeros(4 * count + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + 4 * count].view(np.float32).reshape(shape)


def _find_sgemm() -> tuple[Multiply, str] | None:
    function = _sgemm_of_accelerate() if sys.platform == "darwin" else _sgemm_of_process()
    if function is None:
        return None
    integer, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    function.argtypes = [integer] * 6 + [real, pointer, integer, pointer, integer, real, pointer, integer]
    function.restype = None
    return function, _file_of(function)


def _sgemm_of_accelerate() -> Any | None:
    # MLX is built for Accelerate's new LAPACK interface. Its symbols carry a suffix since macOS 13.3.
    library = ctypes.CDLL("/System/Library/Frameworks/Accelerate.framework/Accelerate")
    return getattr(library, "cblas_sgemm$NEWLAPACK", None) or getattr(library, "cblas_sgemm", None)


def _sgemm_of_process() -> Any | None:
    """Look as the linker does for libmlx: first in globally loaded libraries, then in those that libmlx names."""
    from ..upstream import libmlx

    for path in (None, libmlx()):
        function = getattr(ctypes.CDLL(None if path is None else str(path)), "cblas_sgemm", None)
        if function is not None:
            return function
    return None


class _Location(ctypes.Structure):
    """The structure that dladdr fills (Dl_info)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file_of(function: Any) -> str:
    location = _Location()
    lookup = ctypes.CDLL(None).dladdr
    lookup.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Location)]
    known = lookup(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(location))
    return location.file.decode() if known and location.file else "an unknown file"
