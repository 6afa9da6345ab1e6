"""Each kernel is built once in a process, however many threads ask for it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltatune.ops.kernels import builds


@pytest.fixture(autouse=True)
def nothing_built():
    builds.forget()
    yield
    builds.forget()


class Compiler:
    """Waits until it may go on, at most for so many seconds; knows the threads that it was called in."""

    def __init__(self, seconds: float = 60) -> None:
        self.started, self.may_end, self.threads = threading.Event(), threading.Event(), []
        self._seconds = seconds

    @property
    def built(self) -> int:
        return len(self.threads)

    def __call__(self) -> bytes:
        self.threads.append(threading.current_thread())
        self.started.set()
        assert self.may_end.wait(self._seconds)
        return b"code"


def test_a_caller_waits_for_a_build_in_progress():
    compiler = Compiler()
    with ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            builds.begin(threads, "kernel", compiler)
        assert compiler.started.wait(60)
        asked = [threads.submit(builds.code, "kernel", compiler) for _ in range(3)]
        compiler.may_end.set()
        assert [future.result(60) for future in asked] == [b"code"] * 3
    assert compiler.built == 1


def test_a_caller_builds_a_kernel_that_no_thread_has_begun():
    others, compiler = Compiler(seconds=2), Compiler()
    compiler.may_end.set()
    with ThreadPoolExecutor(1) as threads:
        builds.begin(threads, "another", others)
        builds.begin(threads, "kernel", compiler)
        assert builds.code("kernel", compiler) == b"code"
        others.may_end.set()
    assert compiler.threads == [threading.current_thread()]
    assert others.built == 1


def test_dropped_build_runs_when_asked_for_or_begun_again():
    others, compiler = Compiler(), Compiler()
    compiler.may_end.set()
    dropped = ThreadPoolExecutor(1)
    builds.begin(dropped, "another", others)
    for kernel in ("asked for", "begun again"):
        builds.begin(dropped, kernel, compiler)
    dropped.shutdown(wait=False, cancel_futures=True)
    assert builds.code("asked for", compiler) == b"code"
    with ThreadPoolExecutor(1) as threads:
        builds.begin(threads, "begun again", compiler)
    assert compiler.built == 2
    others.may_end.set()


def test_after_an_error_the_next_call_builds_anew():
    def refused() -> bytes:
        raise RuntimeError("no such word")

    with ThreadPoolExecutor(1) as threads:
        builds.begin(threads, "kernel", refused)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such word"):
            builds.code("kernel", refused)
    assert builds.code("kernel", lambda: b"code") == b"code"
    assert builds.code("kernel", refused) == b"code"
