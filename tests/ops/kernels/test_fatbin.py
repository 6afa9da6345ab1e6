"""Packed kernels: a fat binary with the code in fewer bytes, in a form that the driver knows."""

from __future__ import annotations

import struct

import pytest

from deltatune.machine import nvidia
from deltatune.ops.kernels import fatbin, nvrtc

ARCHITECTURE = "sm_90a"
TEXT = 'extern "C" __global__ void f(float* x) { for (int i = 0; i < 64; ++i) x[i] = x[i] * x[i + 1] + i; }'
# The first bytes of a fat binary, and where its first entry has flags and the size of the unpacked code.
MAGIC, FLAGS, UNPACKED = 0xBA55ED50, 16 + 40, 16 + 56
LZ4, ZSTD = 0x2000, 0x8000


@pytest.fixture(scope="module")
def code() -> bytes:
    return nvrtc.compiled(TEXT, "f", ARCHITECTURE)


@pytest.mark.parametrize(
    ("driver", "mode", "flag"), [((12, 7), "speed", LZ4), ((12, 8), "size", ZSTD), ((13, 0), "size", ZSTD)]
)
def test_code_is_packed_as_the_driver_can_unpack_it(driver, mode, flag, code, monkeypatch):
    monkeypatch.setattr(nvidia, "driver_version", lambda: driver)
    assert fatbin.mode() == mode
    found = fatbin.packed(code, ARCHITECTURE)
    assert struct.unpack_from("<I", found)[0] == MAGIC
    assert struct.unpack_from("<Q", found, FLAGS)[0] & (LZ4 | ZSTD) == flag
    assert struct.unpack_from("<Q", found, UNPACKED)[0] == len(code)
    assert len(found) < 0.75 * len(code)
    assert fatbin.packed(code, ARCHITECTURE) == found


def test_code_that_is_no_kernel_is_refused():
    with pytest.raises(RuntimeError, match="nvFatbin cannot pack a kernel: error"):
        fatbin.packed(b"no code", ARCHITECTURE)


@pytest.mark.parametrize(("release", "serves"), [((12, 5), False), ((12, 6), True), ((13, 0), True)])
def test_a_library_that_is_too_old_is_left_alone(release, serves, monkeypatch):
    class Library:
        def nvFatbinVersion(self, major, minor):  # noqa: N802
            major._obj.value, minor._obj.value = release
            return 0

    library = Library()
    monkeypatch.setattr(nvidia, "library", lambda names: library)
    fatbin._library.cache_clear()
    try:
        assert fatbin._library() is (library if serves else None)
    finally:
        fatbin._library.cache_clear()


def test_without_the_library_code_stays_as_it_is(code, monkeypatch):
    monkeypatch.setattr(fatbin, "_library", lambda: None)
    assert fatbin.mode() == "none"
    assert fatbin.packed(code, ARCHITECTURE) is code
