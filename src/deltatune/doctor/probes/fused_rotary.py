"""Looks for mlx-vlm's fused rotary kernel that has no gradient (mlx-vlm 0.6.2 on Metal)."""

from __future__ import annotations

import mlx.core as mx

from ...models.vision.rotary import fused_rotary
from ...ops.trial.measure import relative_error
from .fault import ABSENT, AVOIDED, BOUND, NOT_RUN, PRESENT, Fault

NAME = "gradient of mlx-vlm's fused rotary kernel"


def find() -> Fault:
    """Compare the kernel's gradient with that of mlx-vlm's own array operations."""
    pair = fused_rotary()
    if isinstance(pair, str):
        return Fault(NAME, NOT_RUN, pair)
    queries, keys = (mx.random.normal((1, 2, 5, 32), key=mx.random.key(seed)) for seed in (0, 1))
    cotangents = [mx.random.normal(queries.shape, key=mx.random.key(seed)) for seed in (2, 3)]
    fused, plain = pair
    expected = mx.vjp(plain, [queries, keys], cotangents)[1]
    try:
        gradients = mx.vjp(fused, [queries, keys], cotangents)[1]
        mx.eval(gradients)
    except (RuntimeError, ValueError) as refusal:
        # A kernel that raises stops training, so that no wrong gradient is used.
        return Fault(NAME, AVOIDED, f"it has none and raises; set fused_apply = False on rotary modules ({refusal})")
    error = max(relative_error(f, e) for f, e in zip(gradients, expected, strict=True))
    if error <= BOUND:
        return Fault(NAME, ABSENT, "agrees with array operations", error)
    return Fault(NAME, PRESENT, "differs from array operations: set fused_apply = False on rotary modules", error)
