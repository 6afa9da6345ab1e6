"""The memory of the default device."""

import pytest

from deltatune.machine import backend


@pytest.mark.parametrize(("device", "found"), [("cpu", 0), ("metal", 60), ("cuda", 80)])
def test_memory_of_a_gpu(device, found, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: device)
    info = {"total_memory": 80, "max_recommended_working_set_size": 60}
    monkeypatch.setattr(backend.mx, "device_info", lambda: info)
    assert backend.gpu_memory() == found
    monkeypatch.setattr(backend.mx, "device_info", dict)
    assert backend.gpu_memory() == 0
