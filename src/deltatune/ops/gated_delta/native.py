"""gated_delta by MLX's own operator, mx.fast.gated_delta_update, where it is there and fast."""

from __future__ import annotations

import mlx.core as mx
from packaging.version import Version

from ...machine import backend
from .gates import effective_gates

VERSION: str = mx.__version__  # type: ignore[attr-defined]
# The first mlx whose operator has a gradient.
SINCE = Version("0.32.4")
# What its Metal kernels cover (mlx 0.32.4); everything else is a loop over tokens.
HEAD_SIZE = 128
HEADS = {(16, 16), (16, 32), (16, 48), (16, 64), (24, 24), (32, 32)}


def gated_delta_native(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    *,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    segments: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """MLX's operator; arguments and result as `gated_delta`. Masks and segments become gates and betas.

    Raises ValueError for a call that it does not serve (`uncovered` says why).
    """
    reason = uncovered(k, v, log_g)
    if reason:
        raise ValueError(f"gated_delta: MLX's own operator does not serve this call: {reason}.")
    log_g, beta = effective_gates(log_g, beta, mask, segments)
    if initial_state is None:
        initial_state = mx.zeros((v.shape[0], v.shape[2], v.shape[3], k.shape[3]), dtype=mx.float32)
    gates = mx.exp(log_g)
    y, state = mx.fast.gated_delta_update(q, k, v, gates, beta, initial_state.astype(mx.float32))
    if mask is not None:
        y = mx.where(mask[..., None, None], y, mx.zeros((), y.dtype))
    return y.astype(q.dtype), state.astype(mx.float32)


def uncovered(k: mx.array, v: mx.array, log_g: mx.array) -> str | None:
    """Why the operator cannot serve a call that has the contract's shapes; None where it can."""
    if Version(VERSION) < SINCE or not hasattr(mx.fast, "gated_delta_update"):
        return f"mlx {VERSION} has none with a gradient, which came with {SINCE}"
    if log_g.ndim == 4:
        return "log_g has a gate per key channel, and it knows one per head, unchecked"
    heads, sizes = (k.shape[2], v.shape[2]), {k.shape[3], v.shape[3]}
    if backend.device() == "metal" and (heads not in HEADS or sizes != {HEAD_SIZE}):
        return f"{heads[0]}/{heads[1]} heads of {k.shape[3]} x {v.shape[3]} would run as a loop over tokens"
    return None
