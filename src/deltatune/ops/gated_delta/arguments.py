"""Checks the arguments of `gated_delta` and `linear_attention`; a message names the operator and the argument."""

from __future__ import annotations

import mlx.core as mx

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
