"""Files that a run reads again and again stay out of the page cache, whoever else reads them meanwhile."""

import fcntl
import os
import sys

import pytest

from deltatune.machine import disk_rate
from deltatune.machine.page_cache import PageCache

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
