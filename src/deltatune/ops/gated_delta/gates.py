"""Masks and document boundaries, expressed as gates and betas: the chunk form then knows neither."""

from __future__ import annotations

import mlx.core as mx


def effective_gates(
    log_g: mx.array, beta: mx.array, mask: mx.array | None, segments: mx.array | None
) -> tuple[mx.array, mx.array]:
    """log_g and beta in fp32, such that a masked step does nothing and a new segment starts from a zero state.

    A masked step has gate 1 and beta 0; the first step of a segment has gate 0, masked or not. Both are constants,
    so no gradient reaches log_g or beta there.
    """
    log_g, beta = log_g.astype(mx.float32), beta.astype(mx.float32)
    if mask is not None:
        beta = mx.where(mask[..., None], beta, 0.0)
        log_g = mx.where(_over(mask, log_g), log_g, 0.0)
    if segments is not None:
        changed = segments[:, 1:] != segments[:, :-1]
        restart = mx.concatenate([mx.zeros((changed.shape[0], 1), dtype=mx.bool_), changed], axis=1)
        log_g = mx.where(_over(restart, log_g), -mx.inf, log_g)
    return log_g, beta


def _over(flags: mx.array, log_g: mx.array) -> mx.array:
    """flags [B, T] shaped to broadcast over log_g [B, T, Hv] or [B, T, Hv, Dk]."""
    return flags.reshape(*flags.shape, *(1,) * (log_g.ndim - 2))
