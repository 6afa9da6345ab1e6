"""Each probe of the doctor finds its fault where it is planted, and only there; its facts about the machine."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from deltatune.doctor import inventory, probes
from deltatune.machine import backend
from deltatune.machine import blas_fault as blas_probe
from deltatune.machine.blas_fault import FAULT, TWO_ROWS, ProbeResult
from layouts import has_gaps


class Namespace:
    """A copy of `module` with some names replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(vars(module) | names)


@pytest.mark.parametrize(
    ("verdict", "device", "replaced", "status"),
    [
        (ProbeResult("good"), "cpu", False, "absent"),
        (ProbeResult(None), "cpu", False, "not run"),
        (ProbeResult("bad", (FAULT.name,)), "cpu", True, "avoided"),
        (ProbeResult("bad", (FAULT.name,)), "cpu", False, "present"),
        (ProbeResult("bad", (FAULT.name,)), "metal", False, "avoided"),
        (ProbeResult("worse", (FAULT.name, TWO_ROWS.name)), "cpu", False, "present"),
    ],
)
def test_one_row(verdict, device, replaced, status, monkeypatch):
    monkeypatch.setattr(blas_probe, "probe", lambda: verdict)
    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(probes, "in_force", lambda: replaced)
    assert probes.find_one_row().status == status


def wrong_rows(a, b, lhs_indices=None, rhs_indices=None, *, sorted_indices=False):
    """A faulty mx.gather_mm that reads row 1 in place of others."""
    if sorted_indices:
        a = mx.concatenate([a[:1], mx.broadcast_to(a[1:2], (len(a) - 1, *a.shape[1:]))]) if len(a) > 1 else a * 2
    return mx.gather_mm(a, b, lhs_indices, rhs_indices)


# MLX's CUDA products have both faults.
HERE = "avoided" if backend.device() == "cuda" else "absent"


def test_sorted_gathers(monkeypatch):
    assert probes.find_forward().status == HERE
    monkeypatch.setattr(probes, "mx", Namespace(mx, gather_mm=wrong_rows))
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    assert probes.find_forward().wrong
    for device in ("cuda", "metal"):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        assert probes.find_forward().status == "avoided"


def first_after_another(a, b, lhs_indices=None, rhs_indices=None, *, sorted_indices=False):
    """A faulty mx.gather_mm that ignores gaps between matrices, so that it reads the second in the wrong place."""
    if has_gaps(b):
        b = mx.concatenate([b[:1], b[:-1]])
    return mx.gather_mm(a, b, lhs_indices, rhs_indices)


def test_sorted_gathers_from_halves(monkeypatch):
    assert probes.find_views().status == HERE
    monkeypatch.setattr(probes, "mx", Namespace(mx, gather_mm=first_after_another))
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    assert probes.find_views().wrong
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    assert probes.find_views().status == "avoided"


def test_product_that_mlx_refuses_is_a_present_fault(monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("cudaGraphAddKernelNode(...) failed: invalid argument\nand more")

    monkeypatch.setattr(probes, "mx", Namespace(mx, gather_mm=refused))
    found = {one.name: one for one in probes.faults()}
    assert len(found) == 3
    for name in (probes.FORWARD, probes.VIEWS):
        detail = "MLX cannot compute it here: cudaGraphAddKernelNode(...) failed: invalid argument"
        assert found[name] == probes.Fault(name, "present", detail)


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
