"""The system beneath a run: a Mac that stays awake, files, memory, versions of packages, arrays read into NumPy."""

import contextlib
import fcntl
import os
import subprocess
import sys
from threading import Thread

import mlx.core as mx
import numpy as np
import pytest

from deltatune.machine import backend, packages
from deltatune.machine.awake import awake
from deltatune.machine.disk import PageCache, disk_rate
from deltatune.machine.host_memory import as_numpy


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
    disk_rate(file, 0.01)
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


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bool_, mx.uint8, mx.int64], ids=str)
def test_the_numbers_are_those_of_the_array(dtype):
    array = mx.arange(12).reshape(3, 4).T.astype(dtype)
    numbers = as_numpy(array)
    assert numbers.dtype.itemsize == dtype.size
    assert numbers.tolist() == array.tolist()


@pytest.mark.parametrize(
    "part", [np.s_[2:], np.s_[:, 1], np.s_[::-1], np.s_[1:4, ::-2], np.s_[None, 2, :0], np.s_[3, 2]], ids=str
)
def test_a_part_has_its_own_numbers(part):
    array = mx.arange(30).reshape(5, 6)
    assert np.array_equal(as_numpy(array[part]), np.arange(30).reshape(5, 6)[part])


def test_they_outlive_the_array():
    numbers = as_numpy(mx.arange(1000) + 1)
    mx.eval(mx.zeros(1000, mx.int32) - 1)
    assert np.array_equal(numbers, np.arange(1, 1001))


def test_an_array_that_cannot_be_computed_is_an_error():
    made = []

    def make() -> None:
        made.append(mx.add(mx.ones(4), 1, stream=mx.new_stream(mx.cpu)))

    # MLX computes an array only in the thread whose stream it was made on.
    thread = Thread(target=make)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="Stream"):
        as_numpy(made[0])
