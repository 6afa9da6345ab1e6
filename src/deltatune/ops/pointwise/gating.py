"""The gate and beta of a gated-delta layer, from what its projections give."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx.nn as nn

from .pass_launch import Execute, Pass
from .passes import Arrays, Passes

# What counts is launches, a dozen less, so few elements are worth it.
LEAST = 2**10


def gates(
    a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, most: float = 1.0, *, execute: Execute = Pass.run
) -> tuple[mx.array, mx.array]:
    """log_g = -exp(A_log) softplus(a + dt_bias) and beta = most sigmoid(b), in one pass forward and one backward.

    Args:
        a, b: [..., H] floats of one dtype.
        A_log, dt_bias: [H].

    Returns log_g and beta [..., H], fp32. Raises ValueError for arrays that `covers` refuses.
    Source: `compute_g` in mlx_lm/models/gated_delta.py.
    """
    if not covers(a, b, A_log, dt_bias):
        raise ValueError(
            f"gates: a {a.shape}, b {b.shape}, A_log {A_log.shape} and dt_bias {dt_bias.shape} do not fit."
        )
    log_g, beta = _passes(a.shape[-1], float(most))(a.reshape(-1), b.reshape(-1), A_log, dt_bias, execute=execute)
    return log_g.reshape(a.shape), beta.reshape(a.shape)


def covers(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> bool:
    """Whether the passes can serve these arrays: one gate a head."""
    heads = a.shape[-1:]
    fits = a.shape == b.shape and a.dtype == b.dtype and A_log.shape == dt_bias.shape == heads
    return fits and a.size > 0 and mx.issubdtype(a.dtype, mx.floating)


def proven(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, most: float = 1.0) -> bool:
    """Whether the passes cover these arrays, are worth it, and are right on this machine."""
    if a.size < LEAST or not covers(a, b, A_log, dt_bias):
        return False
    heads = a.shape[-1]
    kinds = [((12 * heads,), a.dtype)] * 2 + [(x.shape, x.dtype) for x in (A_log, dt_bias)]
    return _passes(heads, float(most)).proven(*kinds)


def log_gate(A_log: mx.array, a: mx.array, dt_bias: mx.array, lower_bound: float | None = None) -> mx.array:
    """Log of the decay, fp32, shaped as `a` [B, T, Hv] or [B, T, Hv, Dk] (mlx-lm: compute_g, compute_lower_bound_g).

    -exp(A_log) softplus(a + dt_bias), or with `lower_bound` (<= 0) lower_bound sigmoid(exp(A_log) (a + dt_bias)).
    """
    rate = mx.exp(A_log.astype(mx.float32))
    step = a.astype(mx.float32) + dt_bias.astype(mx.float32)
    if lower_bound is None:
        return -rate * nn.softplus(step)
    return lower_bound * mx.sigmoid(rate * step)


@cache
def _passes(heads: int, most: float) -> Passes:
    numbers = ("(long)a_shape[0]", str(heads), f"{most!r}f")

    def forward(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> Pass:
        inputs = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
        outputs = dict.fromkeys(("log_g", "beta"), (a.shape, mx.float32))
        return Pass("gates_forward", inputs, outputs, (*numbers, *inputs, *outputs), a.shape[0])

    def backward(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, *cotangents: mx.array) -> Pass:
        d = dict(zip(("dlog_g", "dbeta"), (each.astype(mx.float32) for each in cotangents), strict=True))
        inputs = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, **d}
        outputs = dict.fromkeys(("da", "db"), (a.shape, a.dtype))
        return Pass("gates_backward", inputs, outputs, (*numbers, *inputs, *outputs), a.shape[0])

    def parameters(primals: Arrays, cotangents: Arrays) -> list[mx.array]:
        a, _, A_log, dt_bias = primals
        a, d = a.reshape(-1, heads), cotangents[0].reshape(-1, heads).astype(mx.float32)
        _, found = mx.vjp(lambda *given: [log_gate(given[0], a, given[1])], [A_log, dt_bias], [d])
        return found

    def plain(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> Arrays:
        shape = (-1, heads)
        return [log_gate(A_log, a.reshape(shape), dt_bias).reshape(-1), most * mx.sigmoid(b)]

    return Passes(f"gates of {heads} heads (beta to {most})", forward, backward, plain, parameters)
