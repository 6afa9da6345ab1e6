"""The gate and the beta of a gated-delta layer, computed from the outputs of its projections."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..kernels.launch import Launch
from ..operator.kernel_operator import KernelWorkload
from .passes import Arrays, Passes, by_lane, size_of, wide

# The fewest elements for which the kernel is used: it saves a dozen launches, which few elements are enough for.
LEAST = 2**10


def gates(
    a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, largest_beta: float = 1.0
) -> tuple[mx.array, mx.array]:
    """Return log_g = -exp(A_log) softplus(a + dt_bias) and beta = largest_beta * sigmoid(b), with one kernel each way.

    a and b are [..., H] floats of one dtype, A_log and dt_bias [H], and the results [..., H] fp32. `serves` says
    whether arrays fit. Source: `compute_g` in mlx_lm/models/gated_delta.py.
    """
    passes = _passes(a.shape[-1], float(largest_beta))
    log_g, beta = passes(a, b, A_log, dt_bias)
    return log_g, beta


def serves(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, largest_beta: float = 1.0) -> bool:
    """Whether `gates` is to be used: the gates are one per head, the kernels are faster, and were found right here."""
    heads = a.shape[-1]
    fits = a.shape == b.shape and a.dtype == b.dtype and A_log.shape == dt_bias.shape == (heads,)
    if not fits or a.size < LEAST or not mx.issubdtype(a.dtype, mx.floating):
        return False
    kinds = [((2, 6, heads), a.dtype)] * 2 + [(x.shape, x.dtype) for x in (A_log, dt_bias)]
    return _passes(heads, float(largest_beta)).passes_trial(*kinds)


def log_gate(A_log: mx.array, a: mx.array, dt_bias: mx.array, lower_bound: float | None = None) -> mx.array:
    """Return the logarithm of the decay, fp32 of the shape of a [B, T, Hv] or [B, T, Hv, Dk], by MLX's operations.

    It is -exp(A_log) softplus(a + dt_bias), or with a lower bound of 0 or less lower_bound * sigmoid(exp(A_log) (a +
    dt_bias)). Source: `compute_g` and `compute_lower_bound_g` in mlx_lm/models/gated_delta.py.
    """
    rate = mx.exp(wide(A_log))
    step = wide(a) + wide(dt_bias)
    if lower_bound is None:
        return -rate * mx.logaddexp(step, 0)
    return lower_bound * mx.sigmoid(rate * step)


@cache
def _passes(heads: int, largest_beta: float) -> Passes:
    numbers = str(heads), f"{largest_beta!r}f"

    def forward(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> Launch:
        inputs = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
        outputs = dict.fromkeys(("log_g", "beta"), (a.shape, mx.float32))
        return by_lane("gates_forward", inputs, outputs, (size_of("a", a), *numbers), a.size)

    def backward(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, *cotangents: mx.array) -> Launch:
        d = dict(zip(("dlog_g", "dbeta"), (d.astype(mx.float32) for d in cotangents), strict=True))
        inputs = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, **d}
        outputs = dict.fromkeys(("da", "db"), (a.shape, a.dtype))
        return by_lane("gates_backward", inputs, outputs, (size_of("a", a), *numbers), a.size)

    def parameters(primals: Arrays, cotangents: Arrays) -> list[mx.array]:
        a, _, A_log, dt_bias = primals
        a, d = a.reshape(-1, heads), cotangents[0].reshape(-1, heads).astype(mx.float32)
        # a is an argument: mx.vjp walks through everything that an array which is none was computed from.
        _, (d_A_log, _, d_dt_bias) = mx.vjp(lambda *arrays: [log_gate(*arrays)], [A_log, a, dt_bias], [d])
        return [d_A_log, d_dt_bias]

    def plain(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> Arrays:
        return [log_gate(A_log, a, dt_bias), largest_beta * mx.sigmoid(b)]

    return Passes(f"gates of {heads} heads (beta up to {largest_beta})", forward, backward, plain, parameters)


def workloads(quick: bool) -> list[KernelWorkload]:
    """Return the workloads that the self-test compares with float64."""
    rows, heads = (6, 4) if quick else (4096, 32)
    return _passes(heads, 1.0).workloads("gates", [(rows, heads)] * 2 + [(heads,)] * 2)
