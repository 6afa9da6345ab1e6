"""gated_delta(): the checked entry point; choice.py finds the implementation behind it."""

from __future__ import annotations

import mlx.core as mx

from .choice import Call, choose

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def gated_delta(
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
    """The gated delta rule over a sequence, differentiable in every floating-point argument.

    For each token: S = S diag(exp(log_g)); d = beta (v - S k); S = S + d k^T; y = S q.

    Arguments:
        q, k: [B, T, Hk, Dk], fp32, fp16 or bf16; q arrives scaled. T >= 1.
        v: [B, T, Hv, Dv], Hv a multiple of Hk; value head h reads key head h // (Hv / Hk).
        log_g: [B, T, Hv], or [B, T, Hv, Dk] for a gate per key channel; natural logarithms in [-inf, 0].
        beta: [B, T, Hv], in [0, 2].
        initial_state: [B, Hv, Dv, Dk] before the first token; zeros when None. Feeds the first segment only.
        mask: [B, T] bool; a False step leaves the state as it was and gives y = 0. Its inputs must be finite.
        segments: [B, T] integers, non-decreasing along T; the state restarts from zero where they change.

    Returns y [B, T, Hv, Dv] in q's dtype, and the final state [B, Hv, Dv, Dk] in fp32.

    Raises ValueError, naming the argument, for a wrong shape or dtype; NotImplementedError when a second derivative
    is taken. The values of log_g, beta and segments are not checked. Where the fused kernels serve, mx.vmap is refused
    with a ValueError: fold the mapped axis into B, or force chunk.

    Source: arXiv 2412.06464 (scalar gates), arXiv 2510.26692 (a gate per channel); README.md beside this file.
    """
    _check(q, k, v, log_g, beta, initial_state, mask, segments)
    _, function = choose(Call(q, k, v, log_g, mask is not None, segments is not None))
    return function(q, k, v, log_g, beta, initial_state=initial_state, mask=mask, segments=segments)


def _check(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    initial_state: mx.array | None,
    mask: mx.array | None,
    segments: mx.array | None,
) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"gated_delta: {name} must have 4 dimensions [B, T, H, D], got shape {list(array.shape)}")
    batch, length, key_heads, key_size = k.shape
    value_heads, value_size = v.shape[2:]
    if length < 1:
        raise ValueError("gated_delta: k must hold at least one token (T >= 1), got T = 0")
    if min(batch, key_heads, key_size, value_heads, value_size) < 1:
        raise ValueError(f"gated_delta: empty arguments, got k {list(k.shape)} and v {list(v.shape)}")
    if value_heads % key_heads:
        raise ValueError(f"gated_delta: v must have a multiple of k's {key_heads} heads, got {value_heads}")
    _check_shape("q", q, (batch, length, key_heads, key_size))
    _check_shape("v", v, (batch, length, value_heads, value_size))
    per_channel = log_g.ndim == 4
    _check_shape("log_g", log_g, (batch, length, value_heads) + ((key_size,) if per_channel else ()))
    _check_shape("beta", beta, (batch, length, value_heads))
    for name, array in (("q", q), ("k", k), ("v", v), ("log_g", log_g), ("beta", beta)):
        _check_float(name, array)
    if initial_state is not None:
        _check_shape("initial_state", initial_state, (batch, value_heads, value_size, key_size))
        _check_float("initial_state", initial_state)
    if mask is not None:
        _check_shape("mask", mask, (batch, length))
        if mask.dtype != mx.bool_:
            raise ValueError(f"gated_delta: mask must be bool, got {mask.dtype}")
    if segments is not None:
        _check_shape("segments", segments, (batch, length))
        if not mx.issubdtype(segments.dtype, mx.integer):
            raise ValueError(f"gated_delta: segments must be integers, got {segments.dtype}")


def _check_shape(name: str, array: mx.array, expected: tuple[int, ...]) -> None:
    if tuple(array.shape) != expected:
        raise ValueError(f"gated_delta: {name} must have shape {list(expected)}, got {list(array.shape)}")


def _check_float(name: str, array: mx.array) -> None:
    if array.dtype not in _FLOATS:
        raise ValueError(f"gated_delta: {name} must be float32, float16 or bfloat16, got {array.dtype}")
