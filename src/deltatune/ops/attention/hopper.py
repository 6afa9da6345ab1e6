"""The launches of Hopper's own kernels for bf16 and fp16, which keep its tensor cores busy.

The kernels are in ops/kernels/attention/hopper.h, which explains their outputs; fused_op.py calls the functions here.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from ..kernels.launch import ABSENT, Arrays, Execute, Launch, Outputs, Values
from .fused import WIDEST, FusedOptions, Operands, factors, span_arguments

# The queries of a block; the rows of a packed tile; the groups of 32 threads in a block, and in one of the kernel that
# packs.
ROWS, TILE, GROUPS, PACK_GROUPS = 128, 64, 12, 8
# The widest heads for which a block takes 128 keys at a time.
_NARROW = 128
# The bytes that a block may have, and those that its barriers and the alignment of its memory take.
_MOST, _BARRIERS = 227 * 1024, 192 + 1024


def unsupported(options: FusedOptions, q: mx.array, v: mx.array) -> str | None:
    """Return why these kernels cannot serve a call whose arrays have one dtype, or None where they can."""
    if q.dtype not in (mx.bfloat16, mx.float16):
        return f"q is {q.dtype}, and tensor cores take bfloat16 or float16"
    if q.shape[3] % 8 or v.shape[3] % 8 or max(q.shape[3], v.shape[3]) > WIDEST:
        return f"heads of {q.shape[3]} x {v.shape[3]} are not multiples of 8 up to {WIDEST}"
    if options.scale <= 0:
        return f"the scale {options.scale} is not positive"
    return None


def forward(options: FusedOptions, x: Operands, execute: Execute) -> tuple[mx.array, mx.array]:
    """Compute y and, for each row, the log2 of the sum of 2^score [B, Hq, Tq rounded up to a multiple of 128]."""
    batch, heads, queries, _ = x.q.shape
    outputs: Outputs = {
        "y": ((batch, heads, queries, x.sizes[1]), x.q.dtype),
        "sums": ((batch, heads, _padded(queries)), mx.float32),
    }
    inputs = packed(x, key_tile(*x.sizes), execute) | ({} if x.sinks is None else {"sinks": x.sinks})
    arguments = ("q", "k", "v", "numbers", ABSENT if x.sinks is None else "sinks")
    y, sums = execute(_launch("forward", options, x, inputs, outputs, arguments, {"WITH_SINKS": options.with_sinks}))
    return y, sums


def backward(
    options: FusedOptions, x: Operands, dy: mx.array, y: mx.array, sums: mx.array, execute: Execute
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Compute dq, dk, dv, and the inner product of each row of y with that of dy, in the shape of `sums`."""
    inputs = packed(x, TILE, execute, dy, y)
    inputs["sums"] = sums
    arguments = ("q", "k", "v", "dy", "sums", "delta", "numbers")
    (dq,) = execute(_launch("queries", options, x, inputs, {"dq": (x.q.shape, x.q.dtype)}, arguments, {}))
    outputs: Outputs = {"dk": (x.k.shape, x.k.dtype), "dv": (x.v.shape, x.v.dtype)}
    dk, dv = execute(_launch("keys", options, x, inputs, outputs, arguments, {}))
    return dq, dk, dv, inputs["delta"]


def packed(x: Operands, height: int, execute: Execute, dy: mx.array | None = None, y: mx.array | None = None) -> Arrays:
    """Copy q, k and v into tiles, and return them by name.

    Zeros fill the rows up to a multiple of 128 and the columns up to a multiple of 64. A tile of k or v has `height`
    rows. If dy and y are given, dy is packed too, and the inner products of their rows are returned as `delta`
    [B, Hq, rows].
    """
    (batch, heads, queries, size), (key_heads, keys) = x.q.shape, x.k.shape[1:3]
    of_queries, of_keys = (batch, heads, _padded(queries)), (batch, key_heads, _padded(keys))
    columns, value_columns = (-(-n // 64) * 64 for n in x.sizes)
    shapes = {"q": (*of_queries, columns), "k": (*of_keys, columns), "v": (*of_keys, value_columns)}
    inputs: Arrays = {"q": x.q, "k": x.k, "v": x.v}
    outputs: Outputs = {f"packed_{name}": (shape, x.q.dtype) for name, shape in shapes.items()}
    if dy is not None and y is not None:
        inputs |= {"dy": dy, "y": y}
        outputs["packed_dy"] = ((*of_queries, value_columns), dy.dtype)
        outputs["delta"] = (of_queries, mx.float32)
    matrices = (batch * heads * of_queries[2] * (1 if dy is None else 2), 2 * batch * key_heads * of_keys[2])
    values: Values = {"In": x.q.dtype, "D": size, "DV": x.sizes[1], "HEIGHT": height, "GRADIENTS": dy is not None}
    # Without dy, the kernel has neither these two inputs nor the two outputs for them.
    absent = (ABSENT, ABSENT) if dy is None else ()
    launch = Launch(
        name="attention_hopper_pack",
        memory="HopperPackMemory",
        inputs=inputs,
        outputs=outputs,
        values=values,
        order=tuple(values),
        memory_order=("In",),
        blocks=(sum(matrices) // TILE, 1, 1),
        bytes=16,
        groups=PACK_GROUPS,
        arguments=("q", "k", "v", *(absent or ("dy", "y")), *outputs, *absent),
        sizes=("q_shape[0] * q_shape[1]", "k_shape[0] * k_shape[1]", "q_shape[2]", "k_shape[2]"),
    )
    return {name.removeprefix("packed_"): x for name, x in zip(outputs, execute(launch), strict=True)}


def _launch(
    name: str,
    options: FusedOptions,
    x: Operands,
    inputs: Arrays,
    outputs: Outputs,
    arguments: tuple[str, ...],
    more: Values,
) -> Launch:
    (batch, heads, queries, size), (key_heads, keys) = x.q.shape, x.k.shape[1:3]
    height = TILE if name == "queries" else key_tile(*x.sizes)
    values: Values = {"In": x.q.dtype, "D": size, "DV": x.sizes[1], "HEIGHT": height, "CAUSAL": options.causal}
    values |= {"WINDOW": options.window_of(keys), "SEGMENTED": options.segmented} | more
    own = {"starts": x.starts, "ends": x.ends}
    inputs = inputs | {name: value for name, value in own.items() if value is not None}
    inputs |= {
        "numbers": factors(options.scale),
        "lengths": _lengths(heads, key_heads, queries, keys),
    }
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
    """Return the sizes that a kernel cannot read from the shapes of packed arrays: the same array at every call."""
    return mx.array(values, mx.int32)


def key_tile(size: int, value_size: int) -> int:
    """Return how many keys a block takes at a time, as its memory and registers allow."""
    return 128 if max(size, value_size) <= _NARROW else 64


@lru_cache
def shared_bytes(name: str, size: int, value_size: int) -> int:
    """Return the bytes of shared memory that the structs of kernels/attention/hopper.h take."""
    height = key_tile(size, value_size)
    key, value = (2 * (-(-n // 64) * 64) for n in (size, value_size))
    # The rows that a block keeps throughout; narrow ones are in registers.
    own = 0 if name != "keys" and max(key, value) <= 2 * _NARROW else ROWS * key
    if name == "forward":
        return own + _stages(own, height * (key + value)) * height * (key + value) + _BARRIERS
    if name == "keys":
        own = height * (key + value) + 2 * TILE * TILE * 4
        return own + _stages(own, TILE * (key + value)) * TILE * (key + value) + _BARRIERS
    own += ROWS * value if own else 0
    stages = _stages(own, TILE * (key + value))
    return own + (stages * (key + value) if stages > 1 else 2 * key + value) * TILE + _BARRIERS


def _stages(taken: int, stage: int) -> int:
    """Return how many stages of `stage` bytes fit in addition to `taken` bytes, at most 4."""
    return min(4, (_MOST - _BARRIERS - taken) // stage)


def _padded(length: int) -> int:
    return -(-length // ROWS) * ROWS
