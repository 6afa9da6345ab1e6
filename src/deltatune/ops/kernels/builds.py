"""Builds each kernel once in a process, however many threads ask for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Executor, Future
from threading import Lock

_lock = Lock()
# By the text of the code: the build that has begun, that waits for a thread, or that has ended.
_builds: dict[Hashable, Future[bytes]] = {}


def begin(builders: Executor, key: Hashable, build: Callable[[], bytes]) -> None:
    """Let one of `builders` call `build` for the code of `key`, unless somebody has begun to build it."""
    with _lock:
        if key not in _builds or _builds[key].cancelled():
            _builds[key] = builders.submit(build)


def code(key: Hashable, build: Callable[[], bytes]) -> bytes:
    """Return the code of `key`: of the build that has begun, or else the result of `build`.

    A build that waits for a thread is made in this one. After an error, which is raised, the next call builds anew.
    """
    while True:
        with _lock:
            future = _builds.get(key)
            begun = future is not None and not future.cancel()
            if not begun:
                future = _builds[key] = Future()
        assert future is not None
        try:
            return future.result() if begun else _built_here(future, build)
        except CancelledError:
            continue
        except BaseException:
            with _lock:
                if _builds.get(key) is future:
                    del _builds[key]
            raise


def forget() -> None:
    """Forget the builds of this process."""
    with _lock:
        _builds.clear()


def _built_here(future: Future[bytes], build: Callable[[], bytes]) -> bytes:
    try:
        code = build()
    except BaseException as error:
        future.set_exception(error)
        raise
    future.set_result(code)
    return code
