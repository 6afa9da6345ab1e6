"""Tells which device MLX computes on, its memory, and whether the fused kernels can run there."""

from __future__ import annotations

import mlx.core as mx

from . import nvidia

# The devices on which nobody has measured an order: there implementations are timed, and the fastest serves.
_UNMEASURED = ("metal",)


def device() -> str:
    """Name MLX's default device: `metal`, `cuda` or `cpu`."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def compares_times() -> bool:
    """Whether implementations are chosen by their times on this machine, and not in an order measured elsewhere."""
    return device() in _UNMEASURED


def gpu_memory() -> int:
    """Return the bytes of memory that MLX may use of the default GPU, or 0 on a CPU and where they are not known."""
    name = {"cuda": "total_memory", "metal": "max_recommended_working_set_size"}.get(device())
    return int(mx.device_info().get(name, 0)) if name else 0


def too_old() -> str | None:
    """Say why the fused kernels cannot run on this NVIDIA GPU; None if they can, and on other devices."""
    capability = nvidia.generation() if device() == "cuda" else nvidia.HOPPER
    if capability >= nvidia.HOPPER:
        return None
    return f"the fused kernels need an NVIDIA GPU of compute capability 9.0 or more, and this one has {capability / 10}"
