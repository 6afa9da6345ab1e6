"""The choice of implementation, and what it says when it cannot be had."""

from __future__ import annotations

import pytest

from deltatune import backend


def test_automatic_choice(monkeypatch):
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    assert backend.device() in ("cpu", "cuda", "metal")
    assert backend.gated_delta_implementation() == ("chunk", f"automatic on {backend.device()}")


@pytest.mark.parametrize("name", ["naive", "chunk"])
def test_forced_choice(name, monkeypatch):
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", name)
    assert backend.gated_delta_implementation() == (name, "forced by DELTATUNE_GATED_DELTA")


@pytest.mark.parametrize("name", ["fused", "native"])
def test_what_this_version_lacks_is_refused(name, monkeypatch):
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", name)
    with pytest.raises(ValueError, match=f"{name} asks for an implementation that this version.*naive, chunk"):
        backend.gated_delta_implementation()


def test_unknown_choice(monkeypatch):
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "fast")
    with pytest.raises(ValueError, match="not known"):
        backend.gated_delta_implementation()
