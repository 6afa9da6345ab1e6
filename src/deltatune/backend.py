"""Which device MLX runs on, and which implementation of an operator serves it."""

from __future__ import annotations

import mlx.core as mx

from . import environment

AVAILABLE_GATED_DELTA = ("naive", "chunk")


def device() -> str:
    """Where MLX's default device computes: `metal`, `cuda` or `cpu`."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def gated_delta_implementation() -> tuple[str, str]:
    """The implementation of gated_delta to use, and why: DELTATUNE_GATED_DELTA if set, else `chunk`.

    Raises ValueError when an implementation is forced that this version does not have.
    """
    forced = environment.gated_delta()
    if forced is None:
        return "chunk", f"automatic on {device()}"
    if forced not in AVAILABLE_GATED_DELTA:
        raise ValueError(
            f"{environment.GATED_DELTA}={forced} asks for an implementation that this version of deltatune does not "
            f"have: set it to one of {', '.join(AVAILABLE_GATED_DELTA)}, or unset it for the automatic choice."
        )
    return forced, f"forced by {environment.GATED_DELTA}"
