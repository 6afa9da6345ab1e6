"""Files that a run reads again and again stay out of the page cache, whoever else reads them meanwhile."""

import fcntl
import os
import sys

import pytest

from deltatune.machine import disk_rate
from deltatune.machine.page_cache import PageCache

GLOBAL_NOCACHE = 55


@pytest.fixture
def uncached(monkeypatch):
    """On a pretended macOS, the setting of each file by its inode, as the system keeps it."""
    settings = {}
    plain = fcntl.fcntl

    def follow(descriptor, command, value=0):
        if command != GLOBAL_NOCACHE:
            return plain(descriptor, command, value)
        settings[os.fstat(descriptor).st_ino] = value
        return 0

    monkeypatch.setattr(fcntl, "fcntl", follow)
    monkeypatch.setattr(sys, "platform", "darwin")
    return settings


def test_a_file_stays_uncached_when_its_disk_has_been_measured(uncached, tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(2**16))
    run = PageCache([file])
    disk_rate.measured(file, 0.01)
    assert uncached == {file.stat().st_ino: 1}
    run.close()
    assert uncached == {file.stat().st_ino: 0}


def test_the_last_of_two_readers_lets_a_file_be_cached_again(uncached, tmp_path):
    file, link = tmp_path / "weights", tmp_path / "link"
    file.write_bytes(bytes(8))
    link.symlink_to(file)
    first, second = PageCache([file]), PageCache([link])
    first.close()
    assert uncached == {file.stat().st_ino: 1}
    second.close()
    assert uncached == {file.stat().st_ino: 0}
