"""A run keeps an idle Mac awake, and lets it sleep when the run has ended."""

import contextlib
import os
import subprocess
import sys

from deltatune.machine.awake import awake


def test_caffeinate_holds_a_mac_awake_as_long_as_the_run_goes_on(monkeypatch):
    started = []
    plain = subprocess.Popen

    def popen(command, **options):
        started.append((command, plain(["sleep", "60"], **options)))
        return started[-1][1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(sys, "platform", "darwin")
    with contextlib.suppress(KeyboardInterrupt), awake():
        ((command, process),) = started
        assert command == ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]
        assert process.poll() is None
        raise KeyboardInterrupt
    assert process.poll() is not None


def test_a_mac_without_caffeinate_trains_all_the_same(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "Popen", missing)
    monkeypatch.setattr(sys, "platform", "darwin")
    with awake():
        pass
