"""Runs the launches of a test on the device that its fixture `execute` is, or on a host machine as if on a GPU."""

from collections.abc import Callable

import pytest

from deltatune.machine import backend
from deltatune.ops.kernels.launch import Device, Launch, on
from deltatune.ops.operator import first_use


@pytest.fixture(autouse=True)
def _device(request):
    if "execute" not in request.fixturenames:
        yield
        return
    with on(request.getfixturevalue("execute")):
        yield


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Return pretend_gpu(device, is_right=...) -> the names of the launches, as they are made.

    MLX's device passes for an NVIDIA GPU, with kernels that are right, and `device` runs the launches.
    """

    def pretend(device: Device, is_right: Callable[..., bool] = lambda *_, **__: True) -> list[str]:
        names: list[str] = []
        monkeypatch.setattr(backend, "device", lambda: "cuda")
        monkeypatch.setattr(first_use, "is_right", is_right)
        monkeypatch.setattr(Launch, "run", lambda launch: names.append(launch.name) or device(launch))
        return names

    return pretend
