"""Builds the kernels of calls to come side by side: those of the calls, and those of the trials that precede them.

A trial waits for its own kernels alone, and the next trial's begin to be built when it has ended. So whoever is about
to trace a step traces it once with nothing launched and nothing tried: each implementation counts as right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from ...machine import backend, environment
from ...machine.compiling import not_compiled
from ..kernels.cubin import built_side_by_side
from ..tracing import dispatch

logger = logging.getLogger(__name__)


@contextmanager
def foreseen(trace_calls: Callable[[], Any]) -> Iterator[None]:
    """Let threads build the kernels for the calls in `trace_calls`, on an NVIDIA GPU, while the context goes on.

    Within the context the same calls wait for the kernels that are not ready. Its end drops builds that no thread has
    begun.
    """
    if not backend.builds_kernels() or looks_ahead():
        yield
        return
    builders = ThreadPoolExecutor(environment.cores(), thread_name_prefix="deltatune-builder")
    try:
        look_ahead(trace_calls, builders)
        yield
    finally:
        builders.shutdown(wait=False, cancel_futures=True)


def look_ahead(trace_calls: Callable[[], Any], builders: ThreadPoolExecutor) -> None:
    """Trace calls of which nothing is launched and nothing tried; `builders` build their kernels."""
    try:
        # A function that mx.compile traced now would return the zeros of kernels that are only built for ever after.
        with not_compiled(), built_side_by_side(builders), dispatch.having(foreseen=set()):
            trace_calls()
    except Exception as error:  # noqa: BLE001  (the calls themselves raise it, where somebody can tell its cause)
        logger.info("kernels are built when they are needed: %s: %s", type(error).__name__, error)


def looks_ahead() -> bool:
    """Whether calls are only foreseen."""
    return dispatch.current().foreseen is not None


def build(trial: Hashable, call: Callable[[], Any]) -> None:
    """Build the kernels that `call`, the call of a trial, launches, unless this trial is foreseen already."""
    begun = dispatch.current().foreseen
    if begun is not None and trial not in begun:
        begun.add(trial)
        call()
