"""Tells which device MLX computes on, its memory, and whether the fused kernels can run there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import mlx.core as mx

from . import blas, environment, nvidia

Value = TypeVar("Value")

# Below this size, in bytes, an NVIDIA GPU misses the memory of recorded pieces. More of them make sampling faster.
_SMALL_GPU = 32e9
# The devices on which nobody has measured an order: there implementations are timed, and the fastest serves.
_UNMEASURED = ("metal",)


def device() -> str:
    """Name MLX's default device: `metal`, `cuda` or `cpu`."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def facts() -> dict[str, str]:
    """Name the device and the BLAS, for people."""
    return {"device": device(), "BLAS": str(blas.status())}


def here(values: Mapping[str, Value], other: Value | None = None) -> Value:
    """Return the value for MLX's device of a table by device, or `other`; KeyError for a device with neither."""
    return values[device()] if other is None else values.get(device(), other)


def builds_kernels() -> bool:
    """Whether a kernel is built before its first call, which takes seconds: on NVIDIA GPUs."""
    return device() == "cuda"


def launches_ahead() -> bool:
    """Whether the host launches work long before it is computed, and loses time when it waits: on NVIDIA GPUs."""
    return device() == "cuda"


def computes_beside_host() -> bool:
    """Whether the device computes while the host builds what follows: on GPUs."""
    return device() != "cpu"


def has_own_memory() -> bool:
    """Whether the device has a memory of its own beside the host's: NVIDIA GPUs."""
    return device() == "cuda"


def computes_in_fp32() -> bool:
    """Whether arrays in half precision are better computed in fp32: on CPUs, which have no fast products for them."""
    return device() == "cpu"


def uses_blas() -> bool:
    """Whether MLX's products are those of the CPU's BLAS."""
    return device() == "cpu"


def adds_in_any_order() -> bool:
    """Whether MLX's gradient of indexed rows is summed in another order each time: on GPUs."""
    return device() != "cpu"


def compares_times() -> bool:
    """Whether implementations are chosen by their times on this machine, and not in an order measured elsewhere."""
    return device() in _UNMEASURED


def gpu_memory() -> int:
    """Return the bytes of memory that MLX may use of the default GPU, or 0 on a CPU and where they are not known."""
    name = {"cuda": "total_memory", "metal": "max_recommended_working_set_size"}.get(device())
    return int(mx.device_info().get(name, 0)) if name else 0


def limit_records() -> None:
    """Bound the memory of MLX's recorded pieces on a small NVIDIA GPU; called before MLX evaluates an array."""
    if has_own_memory() and gpu_memory() < _SMALL_GPU:
        environment.keep_few_records()


def give_back() -> None:
    """Give all memory back that no array has: MLX's cache, and freed memory of an NVIDIA GPU's driver."""
    mx.clear_cache()
    if has_own_memory():
        nvidia.give_back()


def too_old() -> str | None:
    """Say why the fused kernels cannot run on this NVIDIA GPU; None if they can, and on other devices."""
    capability = nvidia.generation() if device() == "cuda" else nvidia.HOPPER
    if capability >= nvidia.HOPPER:
        return None
    return f"the fused kernels need an NVIDIA GPU of compute capability 9.0 or more, and this one has {capability / 10}"
