"""Which device MLX runs on, and which implementations of an operator may serve it."""

from __future__ import annotations

import mlx.core as mx

from ..errors import UserError
from . import environment, nvidia

# The first that covers a call and passes its check on this machine serves it (ops/gated_delta/choice.py).
_GATED_DELTA = {"cpu": ("chunk",), "cuda": ("fused", "chunk"), "metal": ("fused", "native", "chunk")}
_ATTENTION = {"cpu": ("blocked",), "cuda": ("fused", "blocked"), "metal": ("fused", "blocked")}


def device() -> str:
    """Where MLX's default device computes: `metal`, `cuda` or `cpu`."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def cache_to_keep() -> int:
    """Bytes of freed buffers that MLX may keep between iterations: 0, and on NVIDIA GPUs a quarter of the memory.

    There each buffer is asked of the driver anew otherwise, which took a quarter of a step (docs/log.md).
    """
    return int(mx.device_info().get("total_memory", 0)) // 4 if device() == "cuda" else 0


def gated_delta_candidates() -> tuple[tuple[str, ...], str]:
    """Implementations of gated_delta in order of preference, and why: what DELTATUNE_GATED_DELTA forces, alone.

    Raises UserError when an implementation is forced that this device cannot run.
    """
    return _candidates(environment.GATED_DELTA, environment.gated_delta(), _GATED_DELTA)


def attention_candidates() -> tuple[tuple[str, ...], str]:
    """Implementations of attention in order of preference, and why: what DELTATUNE_ATTENTION forces, alone.

    Raises UserError when an implementation is forced that this device cannot run.
    """
    return _candidates(environment.ATTENTION, environment.attention(), _ATTENTION)


def _candidates(
    variable: str, forced: str | None, preferred: dict[str, tuple[str, ...]]
) -> tuple[tuple[str, ...], str]:
    here = device()
    lacks = _lacks() if here == "cuda" else None
    if forced is None:
        names = preferred[here]
        return (names[-1:], f"automatic on cuda: {lacks}") if lacks else (names, f"automatic on {here}")
    if forced == "fused" and lacks:
        raise UserError(f"{variable}=fused: {lacks}; unset it for the automatic choice.")
    if forced == "fused" and here == "cpu":
        raise UserError(
            f"{variable}=fused asks for GPU kernels, and MLX's default device is the CPU: unset it for the automatic "
            "choice."
        )
    return (forced,), f"forced by {variable}"


def _lacks() -> str | None:
    """What keeps the fused kernels from this NVIDIA GPU."""
    found = nvidia.generation()
    if found >= nvidia.HOPPER:
        return None
    return f"the fused kernels need an NVIDIA GPU of compute capability 9.0 or more, and this one has {found / 10}"


def gated_delta_implementation() -> tuple[str, str]:
    """The preferred implementation of gated_delta, and why; UserError as gated_delta_candidates."""
    names, why = gated_delta_candidates()
    if len(names) > 1:
        why += f", where it covers a layer and passes its check; else {' or '.join(names[1:])}"
    return names[0], why
