"""Writes masks and document boundaries into gates, betas and values: the chunkwise form needs neither of them."""

from __future__ import annotations

import mlx.core as mx


def effective_gates(
    log_g: mx.array, written: mx.array, mask: mx.array | None, segments: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Return log_g in fp32 and beta under which a masked step does nothing and a new segment starts from a zero state.

    A masked step gets gate 1 and beta 0 (without beta, `written` is v, which becomes 0). The first step of a segment
    gets gate 0, whether it is masked or not. All are constants, so no gradient reaches log_g, beta or v there.
    """
    log_g = log_g.astype(mx.float32)
    if mask is not None:
        written = mx.where(_broadcastable(mask, written), written, mx.zeros((), written.dtype))
        log_g = mx.where(_broadcastable(mask, log_g), log_g, 0.0)
    if segments is not None:
        changed = segments[:, 1:] != segments[:, :-1]
        restart = mx.concatenate([mx.zeros((changed.shape[0], 1), dtype=mx.bool_), changed], axis=1)
        log_g = mx.where(_broadcastable(restart, log_g), -mx.inf, log_g)
    return log_g, written


def _broadcastable(flags: mx.array, array: mx.array) -> mx.array:
    """Return flags [B, T] with axes of 1 appended, so that they broadcast over an array [B, T, ...]."""
    return flags.reshape(*flags.shape, *(1,) * (array.ndim - 2))
