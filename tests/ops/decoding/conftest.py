"""A fixture that runs the launches of a token on the host machine, which watches for races, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from beside import load
from deltatune.machine import backend
from deltatune.ops.kernels.launch import Kernel, Launch, header

host = load(Path(__file__).parents[1] / "kernels" / "host_machine.py")

# The least memory that a block may have on an NVIDIA GPU.
NVIDIA_BYTES = 99 * 1024


@pytest.fixture(scope="session")
def running(host_folder: Path) -> Callable[..., Callable[[Launch], list]]:
    """Return running(kernel, nvidia=False): what runs the launches of a kernel, which NVIDIA GPUs alone run or not."""

    def run(kernel: Kernel, nvidia: bool = False) -> Callable[[Launch], list]:
        if backend.device() == "cuda":
            return Launch.run
        if "fragments.h" in kernel.files:
            return host.HostMachine(host_folder, host.cuda_text(kernel), True, NVIDIA_BYTES, cuda=True).run
        bytes = NVIDIA_BYTES if nvidia else None
        return host.HostMachine(host_folder, header("metal", kernel.files), watch=True, bytes=bytes).run

    return run
