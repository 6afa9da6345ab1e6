"""Tests the limits of an NVIDIA GPU, with a driver, without one, and with one that refuses."""

import pytest

from deltatune.machine import nvidia


class Driver:
    """Stands in for libcuda: `status` is the result of each query, `values` the attributes."""

    def __init__(self, status=0, values=None):
        self.status, self.values = status, values or {97: 101_376, 16: 170}

    def cuInit(self, flags):  # noqa: N802
        return 0

    def cuDriverGetVersion(self, value):  # noqa: N802
        value._obj.value = 12080
        return self.status

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        value._obj.value = self.values[attribute]
        return self.status


@pytest.fixture(autouse=True)
def fresh():
    asked = (nvidia.limits, nvidia.generation, nvidia.driver_version)
    for each in asked:
        each.cache_clear()
    yield
    for each in asked:
        each.cache_clear()


@pytest.mark.parametrize(
    ("driver", "limits", "version"),
    [
        (Driver(), nvidia.Limits(101_376, 170), (12, 8)),
        (Driver(status=100), nvidia.H200, (0, 0)),
        (None, nvidia.H200, (0, 0)),
    ],
    ids=["asked", "refuses", "absent"],
)
def test_limits_and_version_of_the_driver(driver, limits, version, monkeypatch):
    def library(name, _mode):
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(nvidia.ctypes, "CDLL", library)
    assert nvidia.limits() == limits
    assert nvidia.driver_version() == version


@pytest.mark.parametrize(("name", "generation"), [("sm_89", 89), ("sm_121", 121), ("applegpu_g15s", 90), (None, 90)])
def test_generation(name, generation, monkeypatch):
    about = {} if name is None else {"architecture": name}
    monkeypatch.setattr(nvidia.mx, "device_info", lambda _: about)
    assert nvidia.generation() == generation


class Pool:
    """Stands in for libcuda: it keeps freed memory until the host has waited for the GPU, in a context."""

    def __init__(self, refused=""):
        self.refused, self.calls, self.kept = refused, [], 5

    def __getattr__(self, name):
        def call(*_):
            self.calls.append(name)
            if name == "cuMemPoolTrimTo" and self.calls[-2:-1] == ["cuCtxSynchronize"]:
                self.kept = 0
            return int(name == self.refused)

        return call


@pytest.mark.parametrize("refused", ["", "cuInit", "cuDevicePrimaryCtxRetain", "cuDeviceGetDefaultMemPool"])
def test_the_driver_gives_back_what_no_array_has(refused, monkeypatch):
    pool = Pool(refused)
    monkeypatch.setattr(nvidia, "library", lambda names: pool)
    nvidia.give_back()
    assert pool.kept == (5 if refused else 0)
    if not refused:
        assert pool.calls[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]
    monkeypatch.setattr(nvidia, "library", lambda names: None)
    nvidia.give_back()
