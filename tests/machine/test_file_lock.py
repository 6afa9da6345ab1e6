"""Files that several processes write: whole in place of one another, behind locks."""

import errno
import fcntl
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from console import started
from deltatune.machine import atomic_files, file_lock
from deltatune.machine.file_lock import FileLock, HeldError

# This program takes the lock, forks a process that outlives it, says so, and waits.
HOLDER = """
import os, sys, time
from pathlib import Path
from deltatune.machine.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]))
lock.acquire()
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
print(child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "state" / "lock"


@pytest.fixture
def holder(path):
    """Another process that holds the lock, and the process that it has forked."""
    with started([sys.executable, "-c", HOLDER, path], stderr=None) as process:
        child = int(process.stdout.readline())
        yield process, child
        os.kill(child, signal.SIGKILL)


def test_the_holder_is_named_and_its_death_ends_the_lock(path, holder):
    process, child = holder
    with pytest.raises(HeldError, match=rf"process {process.pid} on .+, since \d{{4}}-\d\d-\d\d "):
        FileLock(path).acquire()
    # A refused attempt leaves the lock as it was.
    with pytest.raises(HeldError):
        FileLock(path).acquire()
    process.kill()
    process.wait()
    os.kill(child, 0)
    lock = FileLock(path)
    lock.acquire()
    lock.release()


def test_a_process_has_a_lock_once(path):
    first, second = FileLock(path), FileLock(path)
    first.acquire()
    with pytest.raises(HeldError, match="this process"):
        second.acquire()
    second.release()
    with pytest.raises(HeldError, match="this process"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_folders_made_for_the_lock_go_with_it_if_they_are_empty(path, tmp_path):
    lock = FileLock(path)
    lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    lock.acquire()
    (path.parent / "kept").touch()
    lock.release()
    assert [file.name for file in path.parent.iterdir()] == ["kept"]


def test_a_lock_on_a_file_that_was_moved_away_does_not_count(path, monkeypatch):
    """Between opening the file and locking it, its folder is renamed, and somebody else makes a new one."""
    plain, moves = fcntl.lockf, []

    def lockf(file, how):
        if not moves:
            moves.append(os.rename(path.parent, path.parent.with_name("moved")))
            path.parent.mkdir()
            path.write_text("new")
        return plain(file, how)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock = FileLock(path)
    lock.acquire()
    assert moves
    assert os.path.samestat(os.fstat(lock._file.fileno()), path.stat())
    assert str(os.getpid()) in path.read_text()
    lock.release()


def test_a_file_that_is_another_one_each_time_ends_with_an_error(path, monkeypatch):
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    lock = FileLock(path)
    with pytest.raises(OSError, match="another one each time"):
        lock.acquire()
    lock.release()
    monkeypatch.undo()
    lock.acquire()
    lock.release()


def test_a_file_system_without_locks_excludes_nobody(path, monkeypatch):
    def lockf(*_):
        raise OSError(file_lock._UNSUPPORTED[0], "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock = FileLock(path)
    lock.acquire()
    assert not lock.supported
    lock.release()


def test_an_unreadable_note_of_the_holder_is_no_obstacle(path, holder):
    path.write_bytes(b"\x7b\x22")
    with pytest.raises(HeldError, match="another process"):
        FileLock(path).acquire()


def test_a_full_disk_leaves_no_lock_behind(path, monkeypatch):
    """The holder cannot say who it is there. In a notebook, the process lives on and may try again."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lock = FileLock(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            lock.acquire()
    assert not path.parent.exists()
    lock.acquire()
    lock.release()


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
