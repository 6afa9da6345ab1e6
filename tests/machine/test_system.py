"""The system beneath a run: a Mac that stays awake, the page cache, a device's memory, versions of packages."""

import contextlib
import fcntl
import os
import subprocess
import sys

import pytest

from deltatune.machine import backend, disk_rate, packages
from deltatune.machine.awake import awake
from deltatune.machine.page_cache import PageCache


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


GLOBAL_NOCACHE, NOCACHE = 55, 48


@pytest.fixture
def uncached(monkeypatch):
    """On a pretended macOS, the settings as the system keeps them: one by inode, the other by descriptor."""
    settings = {GLOBAL_NOCACHE: {}, NOCACHE: {}}

    def follow(descriptor, command, value=0):
        settings[command][os.fstat(descriptor).st_ino if command == GLOBAL_NOCACHE else descriptor] = value
        return 0

    monkeypatch.setattr(fcntl, "fcntl", follow)
    monkeypatch.setattr(sys, "platform", "darwin")
    return settings


def test_a_file_stays_uncached_when_its_disk_has_been_measured(uncached, tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(2**16))
    run = PageCache([file])
    disk_rate.measured(file, 0.01)
    assert uncached[GLOBAL_NOCACHE] == {file.stat().st_ino: 1}
    assert list(uncached[NOCACHE].values()) == [1]
    run.close()
    assert uncached[GLOBAL_NOCACHE] == {file.stat().st_ino: 0}


@pytest.mark.parametrize(("device", "found"), [("cpu", 0), ("metal", 60), ("cuda", 80)])
def test_memory_of_a_gpu(device, found, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: device)
    info = {"total_memory": 80, "max_recommended_working_set_size": 60}
    monkeypatch.setattr(backend.mx, "device_info", lambda: info)
    assert backend.gpu_memory() == found
    monkeypatch.setattr(backend.mx, "device_info", dict)
    assert backend.gpu_memory() == 0


def test_missing_package_is_left_out():
    assert list(packages.versions(["mlx", "no-such-package"])) == ["mlx"]


def test_both_libraries_of_models_count():
    assert {"mlx-lm", "mlx-vlm"} <= set(packages.PACKAGES)
