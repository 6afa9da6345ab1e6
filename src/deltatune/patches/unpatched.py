"""mlx-lm's own recurrence, which `deltatune selftest` compares with deltatune's. No patch changes it."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops


def gated_delta_loop(
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
    """Run mlx-lm's loop over tokens, with which its models train. Arguments and result are those of `gated_delta`.

    Raises:
        ValueError: Segments are given, which the loop does not support.

    Source:
        gated_delta_ops in mlx_lm/models/gated_delta.py.
    """
    if segments is not None:
        raise ValueError("gated_delta_loop: mlx-lm's loop does not support segments; leave them out.")
    return gated_delta_ops(q, k, v, mx.exp(log_g), beta, initial_state, mask)
