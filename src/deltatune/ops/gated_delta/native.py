"""gated_delta by MLX's own operator, mx.fast.gated_delta_update, where that is fast and has a gradient."""

from __future__ import annotations

import mlx.core as mx
from packaging.version import Version

from ...machine import backend
from .chunk import effective_gates

VERSION: str = mx.__version__  # type: ignore[attr-defined]
# The first version of mlx with a gradient of the operator.
FIRST_VERSION = Version("0.32.4")
# Head size and (key heads, value heads) that its Metal kernels support in mlx 0.32.4; for others it loops over tokens.
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
    """Call MLX's operator, with mask and segments written into the gates and betas.

    Arguments and results are those of `gated_delta`. A call that it does not serve raises ValueError with the message
    of `unsupported`.
    """
    reason = unsupported(k, v, log_g)
    if reason:
        raise ValueError(f"gated_delta: MLX's own operator does not serve this call: {reason}.")
    log_g, beta = effective_gates(log_g, beta.astype(mx.float32), mask, segments)
    if initial_state is None:
        initial_state = mx.zeros((v.shape[0], v.shape[2], v.shape[3], k.shape[3]), dtype=mx.float32)
    # MLX's operator rounds gates and betas to the dtype of q, and in bf16 a gate of 0.999 would become 1.
    wide_q, wide_k, wide_v, wide_beta, start = (x.astype(mx.float32) for x in (q, k, v, beta, initial_state))
    y, state = mx.fast.gated_delta_update(wide_q, wide_k, wide_v, mx.exp(log_g), wide_beta, start)
    if mask is not None:
        y = mx.where(mask[..., None, None], y, mx.zeros((), y.dtype))
    return y.astype(q.dtype), state.astype(mx.float32)


def unsupported(k: mx.array, v: mx.array, log_g: mx.array) -> str | None:
    """Return why the operator cannot serve a call with these arguments, or None where it can."""
    if Version(VERSION) < FIRST_VERSION or not hasattr(mx.fast, "gated_delta_update"):
        return f"mlx {VERSION} has no gated_delta_update with a gradient, which came with mlx {FIRST_VERSION}"
    if log_g.ndim == 4:
        # It would take such gates as if there were one per head, without an error.
        return "log_g has a gate per key channel, and MLX's operator supports one gate per head only"
    heads = (k.shape[2], v.shape[2])
    sizes = {k.shape[3], v.shape[3]}
    if not loops() and (heads not in HEADS or sizes != {HEAD_SIZE}):
        return f"{heads[0]}/{heads[1]} heads of {k.shape[3]} x {v.shape[3]} would run as a loop over tokens"
    return None


def loops() -> bool:
    """Whether MLX's operator and mlx-lm's run as a loop over tokens: they have kernels on Metal alone."""
    return backend.device() != "metal"
