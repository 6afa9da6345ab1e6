"""The doctor's facts about the machine."""

import pytest

from deltatune.doctor import inventory
from deltatune.machine import backend


def test_speed_is_measured(monkeypatch):
    monkeypatch.setattr(inventory, "_SIDE", 64)
    assert inventory.speed() > 0


@pytest.mark.parametrize(
    ("device", "setting", "shown"),
    [
        ("cpu", "1", "products in full fp32"),
        ("metal", "0", "products in full fp32 (MLX_ENABLE_TF32=0)"),
        (
            "metal",
            "1",
            "products in TF32, 10 bits of mantissa on the matrix units of an M5 and later: MLX_ENABLE_TF32=1 is set",
        ),
        ("cuda", "0", "products in full fp32 (MLX_ENABLE_TF32=0)"),
        ("cuda", "1", "products in TF32, 10 bits of mantissa: MLX_ENABLE_TF32=1 is set"),
    ],
)
def test_tf32_is_said(device, setting, shown, monkeypatch):
    monkeypatch.setenv("MLX_ENABLE_TF32", setting)
    monkeypatch.setattr(backend, "device", lambda: device)
    assert inventory._fp32(device) == shown
