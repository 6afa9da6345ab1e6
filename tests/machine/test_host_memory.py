"""Tests the host's free memory, and the advice to NVIDIA's driver on arrays that stay there."""

import ctypes

import mlx.core as mx
import pytest

from deltatune.machine import backend, host_memory, nvidia
from deltatune.plan import device_limits

GIB = 2**30


@pytest.fixture
def system(tmp_path):
    """system(available, limit, used, files) -> files as Linux writes them, in bytes; no container without a limit."""

    def written(available, limit=None, used=0, files=0, version=2):
        meminfo, cgroups = tmp_path / "meminfo", tmp_path / "cgroups"
        meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\n")
        if limit is not None and version == 2:
            cgroups.mkdir()
            (cgroups / "memory.max").write_text(f"{limit}\n")
            (cgroups / "memory.current").write_text(f"{used}\n")
            (cgroups / "memory.stat").write_text(f"anon 5\nfile {files}\nfile_mapped 7\n")
        elif limit is not None:
            folder = cgroups / "memory"
            folder.mkdir(parents=True)
            # Version 1 has a number in the place of `max`, that of the largest page of 63 bits.
            (folder / "memory.limit_in_bytes").write_text(f"{2**63 - 4096 if limit == 'max' else limit}\n")
            (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"cache 9\nrss 5\ntotal_cache {files}\ntotal_rss 7\n")
        return meminfo, cgroups

    return written


def test_free_host_memory(system, tmp_path):
    assert host_memory.free(*system(8 * GIB)) == 8 * GIB
    assert host_memory.free(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("limit", "expected"), [(6 * GIB, 3 * GIB), (100 * GIB, 8 * GIB), ("max", 8 * GIB)])
def test_free_host_memory_in_a_container(system, version, limit, expected):
    """Pages of files are given back to who asks for memory."""
    assert host_memory.free(*system(8 * GIB, limit, used=5 * GIB, files=2 * GIB, version=version)) == expected


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_bounds_the_memory_of_a_plan(system, version, monkeypatch):
    _, cgroups = system(GIB, 64 * 2**20, used=5, version=version)
    assert host_memory.container(cgroups) == (64 * 2**20, 64 * 2**20 - 5)
    monkeypatch.setattr(device_limits, "container", lambda: host_memory.container(cgroups))
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    limits = device_limits.device_limits()
    assert (limits.bytes, limits.why_bytes) == (64 * 2**20, "the container's memory")
    # Some systems show the limit and not what is taken.
    for file in [*cgroups.rglob("memory.stat"), *cgroups.rglob("memory.usage_in_bytes")]:
        file.unlink()
    assert host_memory.container(cgroups) == (64 * 2**20, 64 * 2**20)
    assert host_memory.container(cgroups / "none") is None


class Driver:
    def __init__(self, status):
        self.status, self.calls = status, []

    def cuMemAdvise_v2(self, address, size, advice, location):  # noqa: N802
        self.calls.append((size.value, advice, location.type))
        return self.status


class Card:
    """A driver with a GPU that has 20 GB free; each call returns `status` if it is the one named."""

    def __init__(self, refused=""):
        self.refused, self.calls = refused, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == "cuMemGetInfo_v2":
                arguments[0]._obj.value = 20 * 10**9
            return int(name == self.refused)

        return call


@pytest.mark.parametrize(
    "refused", ["", "cuInit", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemGetInfo_v2"]
)
def test_a_plan_for_cuda_counts_free_memory(monkeypatch, refused):
    """Another program, or a screen, has the rest of the card; memory of this process serves the run."""
    card = Card(refused)
    monkeypatch.setattr(nvidia, "_driver", lambda: card)
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(backend, "gpu_memory", lambda: 24 * 10**9)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 10**9)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 5 * 10**8)
    limits = device_limits.device_limits()
    if refused:
        assert (limits.bytes, limits.why_bytes) == (24 * 10**9, "the GPU's memory")
    else:
        assert (limits.bytes, limits.why_bytes) == (18 * 10**9, "the free memory of the GPU")
        assert card.calls[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize(
    ("driver", "taken"), [(Driver(0), True), (Driver(801), False), (None, False), (object(), False)]
)
def test_driver_is_advised_to_keep_arrays_on_the_host(monkeypatch, driver, taken):
    monkeypatch.setattr(nvidia, "_driver", lambda: driver)
    array = mx.ones((4, 8), mx.bfloat16)
    assert host_memory.stay([array]) == taken
    if taken:
        # The host is preferred, and the GPU reads there.
        assert driver.calls == [(64, 3, 2), (64, 5, 1)]
        assert ctypes.sizeof(nvidia._Location) == 8
