"""How many bytes the device can hold, and on Metal how many buffers."""

from __future__ import annotations

import os
from dataclasses import dataclass

import mlx.core as mx

from ..machine import backend, nvidia
from ..machine.container import container

# The number in the message `[metal::malloc] Resource limit (499000) exceeded` of Apple GPUs.
METAL_BUFFERS = 499_000
# What CUDA takes during a run beside arrays, for kernels and libraries: up to 1.4 GB on H100s.
CUDA_BYTES = 1_500_000_000
# From this share of what arrays may take on, MLX is made to wait for what it has queued for an NVIDIA GPU. The rest is
# for what an operation allocates before MLX looks.
BRAKE = 0.95


@dataclass(frozen=True)
class DeviceLimits:
    """The limits of a device.

    Args:
        buffers: how many buffers may live at once; None where the device has no such limit.
        bytes: how many bytes may live at once; None where that is not known.
        why_buffers: where the limit of buffers comes from, in words.
        why_bytes: where the limit of bytes comes from, in words.
    """

    buffers: int | None
    bytes: int | None
    why_buffers: str
    why_bytes: str

    @property
    def brake(self) -> int | None:
        """The bytes from which on MLX waits for queued work in a run; None where it is not made to."""
        return None if self.bytes is None else brake(self.bytes)


def brake(size: int) -> int | None:
    """Return the bytes from which on MLX waits for queued work, where arrays may take `size` bytes."""
    return int(BRAKE * size) if backend.device() == "cuda" else None


def device_limits() -> DeviceLimits:
    """The limits of MLX's default device.

    Metal reports both limits. On CUDA arrays may take what is free of the GPU's memory, but for what CUDA needs.
    On a CPU the limit is the memory of the machine or the container.
    """
    device = backend.device()
    if device == "cpu":
        size, why = _main_memory()
        return DeviceLimits(None, size, f"a CPU has no limit; Apple GPUs have {METAL_BUFFERS:,}", why)
    if device == "metal":
        buffers = int(mx.device_info().get("resource_limit", METAL_BUFFERS))
        why = "the GPU's recommended working set"
        return DeviceLimits(buffers, backend.gpu_memory() or None, "the GPU's resource limit", why)
    why = f"CUDA has no limit; Apple GPUs have {METAL_BUFFERS:,}"
    size, why_bytes = _cuda_memory()
    return DeviceLimits(None, size, why, why_bytes)


def _cuda_memory() -> tuple[int | None, str]:
    total, free = backend.gpu_memory(), nvidia.free_memory()
    if free is None:
        return total or None, "the GPU's memory"
    # What this process has taken serves the run.
    free += mx.get_active_memory() + mx.get_cache_memory()
    return max(0, min(total, free) - CUDA_BYTES), "the free memory of the GPU"


def _main_memory() -> tuple[int | None, str]:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None, "this system does not say"
    limited = container()
    if limited is not None and limited.limit < memory:
        return limited.limit, "the container's memory"
    return memory, "the machine's memory"
