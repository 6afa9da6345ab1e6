"""Tests the probe of the BLAS on a correct sgemm, on sgemms with planted faults, and on the one that MLX calls."""

import ctypes
import json
import platform
import subprocess
import sys

import numpy as np
import pytest

from deltatune.machine import blas_fault
from deltatune.machine.blas_fault import CASES, FAULT, TWO_ROWS


def multiply(reads_output=lambda rows, b, old: False):
    """Return a cblas_sgemm made with NumPy; where `reads_output` is true, it adds 0 * C to the product."""

    def sgemm(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        def view(address, rows, columns):
            return np.ctypeslib.as_array((ctypes.c_float * (rows * columns)).from_address(address)).reshape(
                rows, columns
            )

        right = view(b, n, k).T if transpose_b == 112 else view(b, k, n)
        out = view(c, m, n)
        old = beta * out if reads_output(m, b, out) else 0
        out[:] = alpha * view(a, m, k) @ right + old

    return sgemm


def test_a_blas_that_ignores_its_outputs_memory_passes():
    found = blas_fault.examine(multiply(), "good")
    assert (found.wrong, found.faulty, found.two_rows_work) == ((), False, True)
    assert "good computes products of one row correctly" in str(found)


def test_the_known_fault_and_its_controls():
    """The fault shows only if all three hold: one row, B unaligned, and NaN in the output before."""
    found = blas_fault.examine(multiply(lambda rows, b, old: rows == 1 and b % 64), "planted")
    assert found.wrong == (FAULT.name,)
    assert found.faulty
    assert found.two_rows_work
    assert str(found) == "planted computes these products wrongly: one row"


def test_two_rows_wrong_is_no_way_out():
    found = blas_fault.examine(multiply(lambda rows, b, old: True), "worse")
    assert TWO_ROWS.name in found.wrong
    assert not found.two_rows_work


def test_a_fault_with_any_stale_value_is_seen():
    def sgemm(*arguments):
        c = np.ctypeslib.as_array((ctypes.c_float * (arguments[3] * arguments[4])).from_address(arguments[12]))
        before = c.copy()
        multiply()(*arguments)
        if arguments[3] == 1:
            c += before

    found = blas_fault.examine(sgemm, "adds")
    assert set(found.wrong) == {case.name for case in CASES if case.rows == 1} - {"one row, C zero"}


def test_the_blas_here_is_found_and_right():
    found = blas_fault.probe()
    assert found.library is not None
    assert found.wrong == ()


@pytest.mark.skipif(platform.system() != "Linux", reason="Linux binds OpenBLAS")
def test_the_probe_calls_the_sgemm_that_mlx_is_bound_to():
    """The probe must test OpenBLAS if blas.py has bound it, else the library that the wheel brings."""
    code = (
        "import json, deltatune; from deltatune.machine import blas, blas_fault\n"
        "print(json.dumps([blas.status().name, str(blas.status().path), blas_fault.probe().library]))"
    )
    found = {}
    for choice in ("openblas", "system"):
        command = ["env", f"DELTATUNE_BLAS={choice}", sys.executable, "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        name, path, library = json.loads(result.stdout)
        if name != choice:
            pytest.skip("no OpenBLAS to bind here")
        found[choice] = (path, library)
    assert found["openblas"][0] == found["openblas"][1]
    assert "mlx" in found["system"][1]
