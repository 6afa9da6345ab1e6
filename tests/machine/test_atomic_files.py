"""Files are replaced as a whole, whoever writes beside."""

import errno
import fcntl
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltatune.machine import atomic_files


def test_two_threads_may_write_one_file(tmp_path):
    path, both = tmp_path / "file", threading.Barrier(2)

    def write(text: str) -> None:
        def written(temporary):
            temporary.write_text(text)
            both.wait(60)

        atomic_files.replace_file(path, written)

    with ThreadPoolExecutor(2) as threads:
        for ended in [threads.submit(write, text) for text in ("one", "other")]:
            ended.result(60)
    assert path.read_text() in ("one", "other")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("refused", [False, True])
def test_macos_flushes_the_drive_itself_and_a_network_drive_as_it_can(tmp_path, monkeypatch, refused):
    asked = []

    def control(descriptor, command):
        asked.append(command)
        if refused:
            raise OSError(45, "Operation not supported")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append("fsync"))
    monkeypatch.setattr(sys, "platform", "darwin")
    atomic_files.replace_durably(tmp_path / "file", lambda file: file.write(b"text"))
    # The file, then its folder.
    assert asked == ([51, "fsync", 51, "fsync"] if refused else [51, 51])
    assert (tmp_path / "file").read_bytes() == b"text"


@pytest.mark.bad_input("a folder that has no room for a file")
def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    path = tmp_path / "file"

    def fill(temporary):
        temporary.write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device", str(temporary))

    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        atomic_files.replace_file(path, fill)
    assert list(tmp_path.iterdir()) == []
