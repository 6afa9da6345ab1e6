"""Tells which device MLX computes on, and which implementations of gated_delta and attention can run there."""

from __future__ import annotations

import mlx.core as mx

from ..errors import UserError
from . import environment, nvidia

# In order of preference: the choice.py of each operator says which of them serves a call.
_GATED_DELTA: dict[str, tuple[str, ...]] = {
    "cpu": ("chunk",),
    "cuda": ("fused", "chunk"),
    "metal": ("fused", "native", "chunk"),
}
_ATTENTION: dict[str, tuple[str, ...]] = {
    "cpu": ("native", "blocked"),
    "cuda": ("fused", "blocked"),
    "metal": ("fused", "native", "blocked"),
}
# The devices on which nobody has measured that order: there implementations are timed, and the fastest serves.
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


def gated_delta_candidates() -> tuple[tuple[str, ...], str]:
    """Return the implementations of gated_delta that this device can run, in order of preference, and the reason.

    If DELTATUNE_GATED_DELTA forces an implementation, it is the only one.

    Raises:
        UserError: If the forced implementation cannot run on this device.
    """
    return _candidates(environment.GATED_DELTA, environment.gated_delta(), _GATED_DELTA)


def attention_candidates() -> tuple[tuple[str, ...], str]:
    """Return the implementations of attention that this device can run, in order of preference, and the reason.

    If DELTATUNE_ATTENTION forces an implementation, it is the only one.

    Raises:
        UserError: If the forced implementation cannot run on this device.
    """
    return _candidates(environment.ATTENTION, environment.attention(), _ATTENTION)


def _candidates(
    variable: str, forced: str | None, preferred: dict[str, tuple[str, ...]]
) -> tuple[tuple[str, ...], str]:
    """Choose from `preferred`, by device, unless the environment `variable` has the value `forced`."""
    here = device()
    problem = _why_not_fused() if here == "cuda" else None
    if forced is None:
        names = preferred[here]
        return (names[-1:], f"automatic on cuda: {problem}") if problem else (names, f"automatic on {here}")
    if forced == "fused" and problem:
        raise UserError(f"{variable}=fused: {problem}; unset it for the automatic choice.")
    if forced == "fused" and here == "cpu":
        raise UserError(
            f"{variable}=fused asks for GPU kernels, and MLX's default device is the CPU: unset it for the automatic "
            "choice."
        )
    return (forced,), f"forced by {variable}"


def _why_not_fused() -> str | None:
    """Say why the fused kernels cannot run on this NVIDIA GPU; None if they can."""
    capability = nvidia.generation()
    if capability >= nvidia.HOPPER:
        return None
    return f"the fused kernels need an NVIDIA GPU of compute capability 9.0 or more, and this one has {capability / 10}"
