"""How many bytes the device can hold, and on Metal how many buffers."""

from __future__ import annotations

import os
from dataclasses import dataclass

import mlx.core as mx

from ..machine import backend, nvidia
from ..machine.host_memory import container

# The number in the message `[metal::malloc] Resource limit (499000) exceeded` of Apple GPUs.
METAL_BUFFERS = 499_000
# CUDA's memory during a run beside arrays, for kernels and libraries: up to 1.4 GB on H100s.
CUDA_BYTES = 1_500_000_000
# The share of the rest that arrays may fill: the driver's pool keeps what lies between them (docs/decisions/memory.md).
FILLED = 0.9
# From this share of the memory for arrays on, MLX is always made to wait for its queued work on an NVIDIA GPU. The rest
# is for the results of an operation, allocated before MLX looks.
MOST = 0.95
# Below this share it never waits in a step: where MLX may not keep memory that it freed, it asks the driver for it
# again, which takes 10 to 25 us each time (docs/decisions/nvidia-step.md).
FREE = 0.7
# Between the two, a step may take so many times the memory that it needs if each operation waits for the one before.
ROOM = 1.1


@dataclass(frozen=True)
class Brake:
    """From how many bytes on MLX waits for the work that it has queued for an NVIDIA GPU, which keeps its inputs.

    It waits from `most` on in any case, and never below `free`.
    """

    most: int
    free: int

    def limit(self, least: int) -> int:
        """Return the bytes for a step that needs `least` of them if each operation waits for the one before."""
        return min(self.most, max(self.free, int(ROOM * least)))


@dataclass(frozen=True)
class DeviceLimits:
    """How many buffers and bytes may live at once on a device, and where these limits come from, in words.

    None stands for a device without a limit, and for one that is not known.
    """

    buffers: int | None
    bytes: int | None
    why_buffers: str
    why_bytes: str

    @property
    def brake(self) -> Brake | None:
        """From how many bytes on MLX waits for queued work in a run; None where it is not made to."""
        if self.bytes is None or (most := brake(self.bytes)) is None:
            return None
        return Brake(most, int(FREE * self.bytes))


def brake(size: int) -> int | None:
    """Return the bytes from which on MLX always waits for queued work, where arrays may take `size` bytes."""
    return int(MOST * size) if backend.launches_ahead() else None


def device_limits() -> DeviceLimits:
    """The limits of MLX's default device.

    Metal reports both limits. On CUDA arrays may fill most of the GPU's free memory, less CUDA_BYTES. On a CPU the
    limit is the memory of the machine or the container.
    """
    return backend.here({"cpu": _of_cpu, "metal": _of_metal, "cuda": _of_cuda})()


def _of_metal() -> DeviceLimits:
    buffers = int(mx.device_info().get("resource_limit", METAL_BUFFERS))
    why = "the GPU's recommended working set"
    return DeviceLimits(buffers, backend.gpu_memory() or None, "the GPU's resource limit", why)


def _of_cuda() -> DeviceLimits:
    unlimited = f"CUDA has no limit; Apple GPUs have {METAL_BUFFERS:,}"
    total, free = backend.gpu_memory(), nvidia.free_memory()
    if free is None:
        return DeviceLimits(None, total or None, unlimited, "the GPU's memory")
    # Memory that this process has allocated is free for the run.
    free += mx.get_active_memory() + mx.get_cache_memory()
    return DeviceLimits(None, for_arrays(min(total, free)), unlimited, "the free memory of the GPU")


def for_arrays(size: int) -> int:
    """Return how much of so many free bytes of an NVIDIA GPU arrays may take."""
    return max(0, int(FILLED * (size - CUDA_BYTES)))


def _of_cpu() -> DeviceLimits:
    unlimited = f"a CPU has no limit; Apple GPUs have {METAL_BUFFERS:,}"
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return DeviceLimits(None, None, unlimited, "this system does not say")
    limited = container()
    if limited is not None and limited.limit < memory:
        return DeviceLimits(None, limited.limit, unlimited, "the container's memory")
    return DeviceLimits(None, memory, unlimited, "the machine's memory")
