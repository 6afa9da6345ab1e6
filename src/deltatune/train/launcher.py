"""Launches computations in a thread of its own, while the main thread builds the graphs of those that follow.

mx.async_eval returns when ten pieces of work are left for the GPU. Building a step's graph takes longer than these, so
that a GPU waits between two steps if one thread both builds and launches its work.

MLX evaluates arrays only in the thread of the stream that they were made on, unless it belongs to no thread.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import mlx.core as mx

from .tree import leaves

# Seconds to wait for a launch before something else is done; only short iterations are launched here.
PATIENCE = 5.0


class Launcher:
    """Evaluates trees of arrays one after another in another thread, until the `with` block ends.

    The main thread may build on arrays under evaluation, but must not evaluate arrays of `stream` before settle() has
    returned. Nor may it give up an array that is one of several results of an operation, while that operation is
    evaluated. All that is launched here is made on `stream`. `compilations` counts the compiled steps: a new one reads
    arrays for the first time, which may have been made on another stream, so that only the main thread evaluates it.
    """

    def __init__(self) -> None:
        self.stream = _stream(mx.default_device().type)
        self.compilations = 0
        self._thread = ThreadPoolExecutor(1, "launcher")
        self._last: Future[None] = Future()
        self._last.set_result(None)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle(PATIENCE)
        self._thread.shutdown(wait=False)

    def launch(self, *trees: Any) -> Future[None]:
        """Evaluate `trees` when everything before has been launched; the result comes once they are launched.

        Nothing is launched behind a computation that has failed: its error is the result of all that follow.
        """
        before = self._last
        # The trees may be changed before the thread comes to them.
        arrays = [array for _, array in leaves(trees)]

        def evaluated() -> None:
            before.result()
            mx.async_eval(arrays)

        self._last = self._thread.submit(evaluated)
        return self._last

    def before_compiling(self) -> None:
        """Wait until everything is launched: compiling may try kernels, which evaluates arrays in the main thread."""
        # A launch waits for no other rank, but a long batch may take its time.
        self.settle()
        self.compilations += 1

    def finish(self) -> None:
        """Wait until everything is launched, and raise the error that it met."""
        self._last.result()

    def settle(self, seconds: float | None = None) -> None:
        """Wait until everything is launched or has failed, for at most `seconds`; the main thread may then evaluate it.

        A rank that has died may hold a message between ranks, and with it this thread, forever.
        """
        wait([self._last], seconds)


@cache
def _stream(device: mx.DeviceType) -> mx.Stream:
    # MLX never gives a stream back, so that a notebook's runs share one.
    return mx.new_thread_unsafe_stream(device)
