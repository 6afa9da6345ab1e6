"""A fixture that runs the launches of a token on the host machine, which watches for races, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from beside import load
from deltatune.machine import backend
from deltatune.ops.kernels.launch import Kernel, Launch, header

host = load(Path(__file__).parents[1] / "kernels" / "host_machine.py")


@pytest.fixture(scope="session")
def running(host_folder: Path) -> Callable[[Kernel], Callable[[Launch], list]]:
    """Return what runs the launches of a kernel."""

    def run(kernel: Kernel) -> Callable[[Launch], list]:
        if backend.device() == "cuda":
            return Launch.run
        return host.HostMachine(host_folder, header("metal", kernel.files), watch=True).run

    return run
