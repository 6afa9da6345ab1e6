"""The public operator `gated_delta`.

It checks its arguments and hands them to the implementation that choice.py selects for the call.
"""

from __future__ import annotations

import mlx.core as mx

from ..operator import candidates
from .choice import OPERATOR
from .trial_case import Call

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def check(
    operator: str,
    floats: dict[str, mx.array],
    initial_state: mx.array | None,
    mask: mx.array | None,
    segments: mx.array | None,
) -> None:
    """Raise a ValueError where a shape or a dtype is wrong; `floats` are q, k, v, log_g and, for gated_delta, beta."""
    for name in ("q", "k", "v"):
        if floats[name].ndim != 4:
            came = list(floats[name].shape)
            raise ValueError(f"{operator}: {name} must have 4 dimensions [B, T, H, D], got shape {came}")
    k, v = floats["k"], floats["v"]
    batch, length, key_heads, key_size = k.shape
    value_heads, value_size = v.shape[2:]
    if length < 1:
        raise ValueError(f"{operator}: k must hold at least one token (T >= 1), got T = 0")
    if min(batch, key_heads, key_size, value_heads, value_size) < 1:
        raise ValueError(f"{operator}: no size may be 0 (empty arguments), got k {list(k.shape)} and v {list(v.shape)}")
    if value_heads % key_heads:
        raise ValueError(f"{operator}: v must have a multiple of k's {key_heads} heads, got {value_heads}")
    gates = (batch, length, value_heads)
    per_channel = floats["log_g"].ndim == 4
    shapes = {
        "q": (batch, length, key_heads, key_size),
        "v": (batch, length, value_heads, value_size),
        "log_g": (*gates, key_size) if per_channel else gates,
        "beta": gates,
        "initial_state": (batch, value_heads, value_size, key_size),
        "mask": (batch, length),
        "segments": (batch, length),
    }
    optional = {"initial_state": initial_state, "mask": mask, "segments": segments}
    arrays = floats | {name: array for name, array in optional.items() if array is not None}
    for name, shape in shapes.items():
        if name in arrays and tuple(arrays[name].shape) != shape:
            raise ValueError(f"{operator}: {name} must have shape {list(shape)}, got {list(arrays[name].shape)}")
    for name, array in arrays.items():
        if name == "mask":
            if array.dtype != mx.bool_:
                raise ValueError(f"{operator}: mask must be bool, got {array.dtype}")
        elif name == "segments":
            if not mx.issubdtype(array.dtype, mx.integer):
                raise ValueError(f"{operator}: segments must be integers, got {array.dtype}")
        elif array.dtype not in _FLOATS:
            raise ValueError(f"{operator}: {name} must be float32, float16 or bfloat16, got {array.dtype}")


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
    """Run the gated delta rule over a sequence, differentiable in every floating-point argument.

    Each token updates a state S and reads it:
    S = S diag(exp(log_g)); d = beta (v - S k); S = S + d k^T; y = S q.

    Args:
        q: Queries [B, T, Hk, Dk] in fp32, fp16 or bf16, already scaled (usually by Dk^-0.5). T is at least 1.
        k: Keys [B, T, Hk, Dk].
        v: Values [B, T, Hv, Dv]. Hv is a multiple of Hk, and value head h reads key head h // (Hv / Hk).
        log_g: Natural logarithms of the gates, in [-inf, 0]: [B, T, Hv] for one gate per head, or [B, T, Hv, Dk] for
            one gate per key channel.
        beta: Writing strengths [B, T, Hv], in [0, 2].
        initial_state: The state [B, Hv, Dv, Dk] before the first token of the first segment. None means zeros.
        mask: [B, T] booleans. A step that is False leaves the state unchanged and gives y = 0; its inputs must be
            finite.
        segments: [B, T] integers that never decrease along T. The state restarts from zero wherever they change.

    Returns:
        y [B, T, Hv, Dv] in q's dtype, and the final state [B, Hv, Dv, Dk] in fp32.

    Raises:
        ValueError: An argument has a wrong shape or dtype (the message names it), or mx.vmap maps a call that the fused
            kernels serve. The values of log_g, beta and segments are not checked.
        NotImplementedError: A second derivative is taken.
        UserError: DELTATUNE_GATED_DELTA forces an implementation that cannot serve this call.

    Source:
        arXiv 2412.06464 (one gate per head), arXiv 2510.26692 (a gate per key channel), and README.md in this folder.

    Example:
        >>> q, k, v = (mx.random.normal((1, 8, 2, 16)) for _ in range(3))
        >>> k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
        >>> log_g, beta = mx.full((1, 8, 2), -0.1), mx.full((1, 8, 2), 0.5)
        >>> y, state = gated_delta(q * 16**-0.5, k, v, log_g, beta)
        >>> y.shape, state.shape
        ((1, 8, 2, 16), (1, 2, 16, 16))
    """
    floats = {"q": q, "k": k, "v": v, "log_g": log_g, "beta": beta}
    check("gated_delta", floats, initial_state, mask, segments)
    _, function = candidates.choose(OPERATOR, Call(q, k, v, log_g, mask is not None, segments is not None, beta.dtype))
    return function(q, k, v, log_g, beta, initial_state=initial_state, mask=mask, segments=segments)
