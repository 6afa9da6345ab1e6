"""Tests what is said of the host's free memory, and what NVIDIA's driver is told of arrays that stay there."""

import ctypes

import mlx.core as mx
import pytest

from deltatune.machine import host_memory, nvidia

GIB = 2**30


@pytest.fixture
def system(tmp_path):
    """system(available, limit, used, files) -> files as Linux writes them, in bytes; no container without a limit."""

    def written(available, limit=None, used=0, files=0):
        meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
        meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\n")
        if limit is not None:
            cgroup.mkdir()
            (cgroup / "memory.max").write_text(f"{limit}\n")
            (cgroup / "memory.current").write_text(f"{used}\n")
            (cgroup / "memory.stat").write_text(f"anon 5\nfile {files}\nfile_mapped 7\n")
        return meminfo, cgroup

    return written


def test_what_is_free(system, tmp_path):
    assert host_memory.free(*system(8 * GIB)) == 8 * GIB
    assert host_memory.free(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(("limit", "expected"), [(6 * GIB, 3 * GIB), (100 * GIB, 8 * GIB), ("max", 8 * GIB)])
def test_what_is_free_in_a_container(system, limit, expected):
    """Pages of files are given back to who asks for memory."""
    assert host_memory.free(*system(8 * GIB, limit, used=5 * GIB, files=2 * GIB)) == expected


class Driver:
    def __init__(self, status):
        self.status, self.calls = status, []

    def cuMemAdvise_v2(self, address, size, advice, location):  # noqa: N802
        self.calls.append((size.value, advice, location.type))
        return self.status


@pytest.mark.parametrize(
    ("driver", "taken"), [(Driver(0), True), (Driver(801), False), (None, False), (object(), False)]
)
def test_what_the_driver_is_told(monkeypatch, driver, taken):
    monkeypatch.setattr(nvidia, "_driver", lambda: driver)
    array = mx.ones((4, 8), mx.bfloat16)
    assert host_memory.stay([array]) == taken
    if taken:
        # The host is preferred, and the GPU reads there.
        assert driver.calls == [(64, 3, 2), (64, 5, 1)]
        assert ctypes.sizeof(nvidia._Location) == 8
