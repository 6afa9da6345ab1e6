"""Fixtures of patches: a small package to patch, checks that are asked anew, and kernels on the host machine."""

from pathlib import Path

import pytest
from host_machine import HostMachine

from beside import load
from deltatune.ops.kernels.launch import Launch, header
from deltatune.ops.pointwise.passes import BODIES, Passes
from deltatune.patches import evidence

acme = load(Path(__file__).with_name("acme_package.py")).acme


@pytest.fixture
def asked_anew(monkeypatch):
    """Every check is asked, whatever was remembered; without this fixture, none is remembered or stored in tables/."""
    evidence.forget()
    monkeypatch.setattr(evidence, "_read", lambda key: None)
    monkeypatch.setattr(evidence, "_write", lambda *stored: None)
    yield
    evidence.forget()


@pytest.fixture
def passes_on_host(host_folder, monkeypatch):
    """passes_on_host(*files): from then on the host machine runs the pointwise kernels; a list names those that ran."""

    def start(*files: str) -> list[str]:
        machine, call = HostMachine(host_folder, header("metal", (*BODIES, *files))), Passes.__call__
        served: list[str] = []

        def recorded(self, *arrays):
            served.append(self.name)
            return call(self, *arrays)

        monkeypatch.setattr(Passes, "__call__", recorded)
        monkeypatch.setattr(Launch, "run", machine.run)
        monkeypatch.setattr(Passes, "passes_trial", lambda self, *kinds, others=(): True)
        return served

    return start
