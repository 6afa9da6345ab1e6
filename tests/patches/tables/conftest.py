"""Every test of the tables begins and ends without patches."""

from __future__ import annotations

import pytest

from deltatune.patches import evidence, revert


@pytest.fixture(autouse=True)
def _revert():
    yield
    revert()


@pytest.fixture
def asked_anew(monkeypatch):
    """Every check is asked, whatever was remembered; without this fixture, none is."""
    evidence.forget()
    monkeypatch.setattr(evidence, "_read", lambda key: None)
    monkeypatch.setattr(evidence, "_write", lambda *stored: None)
