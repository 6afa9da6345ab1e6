"""Measures of error, and devices: the launches of a test run on its fixture `execute`, or as if on a GPU."""

from collections.abc import Callable

import pytest

from deltatune.machine import backend
from deltatune.ops.kernels.launch import Device, Launch, on
from deltatune.ops.operator import kernel_operator
from deltatune.ops.operator.measure import relative_error, relative_norm


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
        monkeypatch.setattr(kernel_operator, "is_right", is_right)
        monkeypatch.setattr(Launch, "run", lambda launch: names.append(launch.name) or device(launch))
        return names

    return pretend


@pytest.fixture
def errors():
    """Return errors(results, truth) -> by name, the largest error relative to the largest true element."""
    return lambda results, truth: {name: relative_error(results[name], truth[name]) for name in truth}


@pytest.fixture
def norms():
    """Return norms(results, truth) -> by name, the norm of the error relative to that of the truth."""
    return lambda results, truth: {name: relative_norm(results[name], truth[name]) for name in truth}
