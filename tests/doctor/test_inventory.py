"""The doctor's facts about the machine."""

from types import SimpleNamespace

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


@pytest.mark.parametrize(("content", "said"), [(b"steel_gemm_fused_nax", "NAX kernels"), (b"gemm", "no NAX kernels")])
def test_kernels_of_the_matrix_units_are_looked_for(content, said, monkeypatch, tmp_path):
    monkeypatch.setattr(inventory, "libmlx", lambda: tmp_path / "libmlx.dylib")
    assert inventory.mlx_build() == "no Metal library"
    (tmp_path / "mlx.metallib").write_bytes(content)
    assert inventory.mlx_build() == said


def test_the_thermal_state_is_the_words_of_macos_where_there_are_any(monkeypatch):
    monkeypatch.setattr(inventory.sys, "platform", "darwin")
    ran = SimpleNamespace(stdout="CPU_Speed_Limit = 80\n")
    monkeypatch.setattr(inventory.subprocess, "run", lambda command, **_: ran if "therm" in command else None)
    assert inventory.thermal_state() == "CPU_Speed_Limit = 80"
