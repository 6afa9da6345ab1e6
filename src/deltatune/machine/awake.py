"""Keeps a Mac from falling asleep while a run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def awake() -> Iterator[None]:
    """Keep a Mac that nobody uses awake within the context, by macOS's `caffeinate`. Other systems are left alone.

    The display may sleep, and a closed lid puts a laptop to sleep all the same. `caffeinate` ends with this process,
    however that ends.
    """
    if sys.platform != "darwin":
        yield
        return
    command = ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]
    process = None
    # Without the program a run goes on as it would have.
    with suppress(OSError):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            process.wait()
