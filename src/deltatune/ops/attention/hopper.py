"""Launches the kernels of kernels/attention_hopper.h: tensor cores at their own rate for bf16 and fp16 on Hopper."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from ..kernels.launch import Arrays, Launch, Outputs, Values, numbers
from .fused import LOG2E, WIDEST, Kind, Operands, span_arguments

# Rows of queries a block takes, and of a packed tile; its groups of 32 threads; those of a kernel that only packs.
ROWS, TILE, GROUPS, PACK_GROUPS = 128, 64, 12, 8
# With heads no wider than this a block takes 128 keys at a time.
_NARROW = 128
# Bytes that a block may have, and what its gates and the start of its memory take.
_MOST, _GATES = 227 * 1024, 128 + 1024


def uncovered(kind: Kind, q: mx.array, v: mx.array) -> str | None:
    """Why these kernels cannot serve a call that has one dtype; None where they can."""
    if q.dtype not in (mx.bfloat16, mx.float16):
        return f"q is {q.dtype}, and tensor cores take bfloat16 or float16"
    if q.shape[3] % 8 or v.shape[3] % 8 or max(q.shape[3], v.shape[3]) > WIDEST:
        return f"heads of {q.shape[3]} x {v.shape[3]} are no multiples of 8 up to {WIDEST}"
    if kind.scale <= 0:
        return f"the scale {kind.scale} is not positive"
    return None


def forward(kind: Kind, x: Operands, execute) -> tuple[mx.array, mx.array]:
    """y, and the base-2 logarithm of each row's sum of powers of two [B, HQ, TQ up to a multiple of 128]."""
    (q, k, v), (batch, heads, queries, _) = _packed(x, key_tile(*x.sizes), execute), x.q.shape
    outputs: Outputs = {
        "y": ((batch, heads, queries, x.sizes[1]), x.q.dtype),
        "sums": ((batch, heads, _padded(queries)), mx.float32),
    }
    inputs = {"q": q, "k": k, "v": v}
    inputs |= {} if x.sinks is None else {"sinks": x.sinks}
    arguments = ("q", "k", "v", "numbers", "Nothing{}" if x.sinks is None else "sinks")
    more: Values = {"SUNK": kind.sunk}
    y, sums = execute(_launch("forward", kind, x, inputs, outputs, arguments, more))
    return y, sums


def backward(
    kind: Kind, x: Operands, dy: mx.array, y: mx.array, sums: mx.array, execute
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """dq, dk, dv, and the sum of products of y's and dy's elements by row, as long as `sums`."""
    (delta,) = execute(_delta(y, dy))
    q, k, v = _packed(x, TILE, execute)
    inputs = {"q": q, "k": k, "v": v, "dy": pack(dy, TILE, execute), "sums": sums, "delta": delta}
    arguments = (*inputs, "numbers")
    (dq,) = execute(_launch("queries", kind, x, inputs, {"dq": (x.q.shape, x.q.dtype)}, arguments, {}))
    outputs: Outputs = {"dk": (x.k.shape, x.k.dtype), "dv": (x.v.shape, x.v.dtype)}
    dk, dv = execute(_launch("keys", kind, x, inputs, outputs, arguments, {}))
    return dq, dk, dv, delta


def pack(x: mx.array, height: int, execute) -> mx.array:
    """[B, H, T, D] as tiles of `height` rows, with zeros up to 128 rows and 64 columns: [B, H, elements]."""
    batch, heads, length, size = x.shape
    rows, columns = _padded(length), -(-size // 64) * 64
    launch = Launch(
        name="attention_hopper_pack",
        memory="HopperPackMemory",
        inputs={"x": x},
        outputs={"tiles": ((batch, heads, rows * columns), x.dtype)},
        values={"In": x.dtype, "D": size, "HEIGHT": height},
        order=("In", "D", "HEIGHT"),
        memory_order=("In",),
        blocks=(rows // height, batch * heads, 1),
        bytes=16,
        groups=PACK_GROUPS,
        sizes=("x_shape[2]",),
    )
    return execute(launch)[0]


def _packed(x: Operands, height: int, execute) -> tuple[mx.array, mx.array, mx.array]:
    return pack(x.q, TILE, execute), pack(x.k, height, execute), pack(x.v, height, execute)


def _delta(y: mx.array, dy: mx.array) -> Launch:
    rows = _padded(y.shape[2])
    return Launch(
        name="attention_hopper_delta",
        memory="HopperDeltaMemory",
        inputs={"y": y, "dy": dy},
        outputs={"delta": ((*y.shape[:2], rows), mx.float32)},
        values={"In": y.dtype, "DV": y.shape[3]},
        order=("In", "DV"),
        memory_order=("In",),
        blocks=(rows // PACK_GROUPS, y.shape[0] * y.shape[1], 1),
        bytes=16,
        groups=PACK_GROUPS,
        sizes=("y_shape[2]",),
    )


def _launch(
    name: str, kind: Kind, x: Operands, inputs: Arrays, outputs: Outputs, arguments: tuple[str, ...], more: Values
) -> Launch:
    (batch, heads, queries, size), (key_heads, keys) = x.q.shape, x.k.shape[1:3]
    height = TILE if name == "queries" else key_tile(*x.sizes)
    values: Values = {"In": x.q.dtype, "D": size, "DV": x.sizes[1], "HEIGHT": height, "CAUSAL": kind.causal}
    values |= {"WINDOW": kind.window_of(keys), "SEGMENTED": kind.segmented} | more
    own = {"starts": x.starts, "ends": x.ends}
    inputs = inputs | {name: value for name, value in own.items() if value is not None}
    inputs |= {"numbers": numbers(kind.scale * LOG2E, kind.scale), "lengths": _lengths(heads, key_heads, queries, keys)}
    on_keys = name == "keys"
    tiles = _padded(keys) // height if on_keys else _padded(queries) // ROWS
    return Launch(
        name=f"attention_hopper_{name}",
        memory=f"Hopper{name.capitalize()}Memory",
        inputs=inputs,
        outputs=outputs,
        values=values,
        order=tuple(values),
        memory_order=("In", "D", "DV", "HEIGHT"),
        blocks=(key_heads if on_keys else heads, batch, tiles),
        bytes=shared_bytes(name, *x.sizes),
        groups=GROUPS,
        arguments=(*arguments, *span_arguments(x), *outputs),
        sizes=tuple(f"lengths[{i}]" for i in range(4)),
    )


@lru_cache(maxsize=256)
def _lengths(*values: int) -> mx.array:
    """For kernels to read, since packed arrays do not show them; the same array for all that ask."""
    return mx.array(values, mx.int32)


def key_tile(size: int, value_size: int) -> int:
    """Keys that a block takes at a time, as the memory and the registers of a block allow."""
    return 128 if max(size, value_size) <= _NARROW else 64


@lru_cache
def shared_bytes(name: str, size: int, value_size: int) -> int:
    """As the structs of kernels/attention_hopper.h lay it out."""
    height = key_tile(size, value_size)
    key, value = (2 * (-(-n // 64) * 64) for n in (size, value_size))
    if name == "forward":
        return ROWS * key + 2 * height * (key + value) + _GATES
    if name == "keys":
        return (height + 2 * TILE) * (key + value) + TILE * TILE * 4 + 1024 + _GATES
    found = ROWS * (key + value) + 2 * TILE * key + _GATES
    return found + (2 if found + 2 * TILE * value <= _MOST else 1) * TILE * value


def _padded(length: int) -> int:
    return -(-length // ROWS) * ROWS
