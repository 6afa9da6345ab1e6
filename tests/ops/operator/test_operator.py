"""Which implementations of an operator each device gets, and the refusal of one that cannot run."""

import pytest

from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.ops.operators import GATED_DELTA


def test_automatic_choice(monkeypatch):
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    assert GATED_DELTA.order() == (("chunk",), "automatic on cpu")


@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_a_gpu_prefers_the_fused_kernels(device, monkeypatch):
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setattr(backend, "device", lambda: device)
    names, why = GATED_DELTA.order()
    assert (names[0], names[-1], why) == ("fused", "chunk", f"automatic on {device}")


@pytest.mark.parametrize("name", ["naive", "chunk", "native"])
def test_forced_choice(name, monkeypatch):
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", name)
    assert GATED_DELTA.order() == ((name,), "forced by DELTATUNE_GATED_DELTA")


def test_gpu_kernels_forced_on_a_cpu_are_refused(monkeypatch):
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "fused")
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    with pytest.raises(UserError, match=r"fused asks for GPU kernels.*is the CPU"):
        GATED_DELTA.order()
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    assert GATED_DELTA.order() == (("fused",), "forced by DELTATUNE_GATED_DELTA")


def test_an_nvidia_gpu_older_than_hopper_gets_chunk(monkeypatch):
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(backend.nvidia, "generation", lambda: 89)
    needs = "the fused kernels need an NVIDIA GPU of compute capability 9.0 or more, and this one has 8.9"
    assert GATED_DELTA.order() == (("chunk",), f"automatic on cuda: {needs}")
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "fused")
    with pytest.raises(UserError, match=f"GATED_DELTA=fused: {needs}; unset it"):
        GATED_DELTA.order()
