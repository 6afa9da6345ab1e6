"""A fixture that runs the launches of a token on the host machine, which watches for races, or on a GPU."""

from collections.abc import Callable
from functools import cache

import pytest
from host_machine import HostMachine, cuda_text

from deltatune.machine import backend
from deltatune.ops.decoding import gated_attention_token
from deltatune.ops.kernels.launch import Kernel, Launch, header

# The least memory that a block may have on an NVIDIA GPU.
NVIDIA_BYTES = 99 * 1024


@pytest.fixture(scope="session")
def running(host_folder):
    """Return running(kernel): the function that runs the launches of a kernel."""

    @cache
    def run(kernel: Kernel) -> Callable[[Launch], list]:
        if backend.device() == "cuda":
            return Launch.run
        if "fragments.h" in kernel.files:
            # These run for longer than they compile.
            return HostMachine(host_folder, cuda_text(kernel), True, NVIDIA_BYTES, cuda=True, optimised=True).run
        # NVIDIA GPUs alone run the kernel of a gated attention layer.
        bytes = NVIDIA_BYTES if kernel is gated_attention_token.KERNEL else None
        return HostMachine(host_folder, header("metal", kernel.files), watch=True, bytes=bytes).run

    return run
