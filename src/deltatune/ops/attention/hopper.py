"""The launches of Hopper's own kernels for bf16 and fp16, which keep its tensor cores busy.

The kernels are in ops/kernels/attention/hopper.h, which explains their outputs; fused_op.py calls the functions here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import mlx.core as mx

from ..kernels.launch import HOPPER_WORDS, Arrays, Blocks, Execute, Kernel, Launch, Outputs, Values
from . import fused
from .fused import WIDEST, FusedOptions, Operands, factors

# The queries of a block; the rows of a packed tile; the groups of 32 threads in a block, and in one of the kernel that
# packs.
ROWS, TILE, GROUPS, PACK_GROUPS = 128, 64, 12, 8
# The widest heads for which a block takes 128 keys at a time.
_NARROW = 128
# The bytes that a block may have, and those that its barriers and the alignment of its memory take.
_MOST, _BARRIERS = 227 * 1024, 192 + 1024


_FILES = (*HOPPER_WORDS, *fused.FILES, "attention/hopper.h")
_VALUES = ("In", "D", "DV", "HEIGHT", "CAUSAL", "WINDOW", "SEGMENTED")


@dataclass(frozen=True, kw_only=True, eq=False)
class HopperKernel(Kernel):
    """A kernel that reads packed tiles.

    Attributes:
        bytes: The shared memory of a block, for the sizes of a key head and of a value head.
    """

    sizes: tuple[str, ...] = tuple(f"lengths[{i}]" for i in range(4))
    memory_values: tuple[str, ...] = ("In", "D", "DV", "HEIGHT")
    bounded: bool = True
    bytes: Callable[[int, int], int]


def unsupported(options: FusedOptions, q: mx.array, v: mx.array) -> str | None:
    """Return why these kernels cannot serve a call with arrays of one dtype, or None where they can."""
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
    blocks = heads, batch, _padded(queries) // ROWS
    y, sums = execute(_launch(FORWARD, options, x, key_tile(*x.sizes), inputs, outputs, blocks))
    return y, sums


def backward(
    options: FusedOptions, x: Operands, dy: mx.array, y: mx.array, sums: mx.array, execute: Execute
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Compute dq, dk, dv, and the inner product of each row of y with that of dy, in the shape of `sums`."""
    inputs = packed(x, TILE, execute, dy, y)
    inputs["sums"] = sums
    (batch, heads, queries, _), (key_heads, keys) = x.q.shape, x.k.shape[1:3]
    blocks = heads, batch, _padded(queries) // ROWS
    (dq,) = execute(_launch(QUERIES, options, x, TILE, inputs, {"dq": (x.q.shape, x.q.dtype)}, blocks))
    height = key_tile(*x.sizes)
    outputs: Outputs = {"dk": (x.k.shape, x.k.dtype), "dv": (x.v.shape, x.v.dtype)}
    blocks = key_heads, batch, _padded(keys) // height
    dk, dv = execute(_launch(KEYS, options, x, height, inputs, outputs, blocks))
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
    launch = Launch(
        kernel=PACK,
        inputs=inputs,
        outputs=outputs,
        values=values,
        blocks=(sum(matrices) // TILE, 1, 1),
        bytes=16,
        groups=PACK_GROUPS,
    )
    return {name.removeprefix("packed_"): x for name, x in zip(outputs, execute(launch), strict=True)}


def _launch(
    kernel: HopperKernel,
    options: FusedOptions,
    x: Operands,
    height: int,
    inputs: Arrays,
    outputs: Outputs,
    blocks: Blocks,
) -> Launch:
    (heads, queries, size), (key_heads, keys) = x.q.shape[1:], x.k.shape[1:3]
    values: Values = {"In": x.q.dtype, "D": size, "DV": x.sizes[1], "HEIGHT": height, "CAUSAL": options.causal}
    values |= {"WINDOW": options.window_of(keys), "SEGMENTED": options.segmented}
    values |= {"WITH_SINKS": options.with_sinks}
    spans = {"starts": x.starts, "ends": x.ends}
    inputs = inputs | {name: array for name, array in spans.items() if array is not None}
    inputs |= {"numbers": factors(options.scale), "lengths": _lengths(heads, key_heads, queries, keys)}
    return Launch(
        kernel=kernel,
        inputs=inputs,
        outputs=outputs,
        values={name: values[name] for name in kernel.values},
        blocks=blocks,
        bytes=kernel.bytes(*x.sizes),
        groups=GROUPS,
    )


@lru_cache(maxsize=256)
def _lengths(*values: int) -> mx.array:
    """Return the sizes that a kernel cannot read from the shapes of packed arrays: the same array at every call."""
    return mx.array(values, mx.int32)


def key_tile(size: int, value_size: int) -> int:
    """Return how many keys a block takes at a time, as its memory and registers allow."""
    return 128 if max(size, value_size) <= _NARROW else 64


@lru_cache
def forward_bytes(size: int, value_size: int) -> int:
    """Return the bytes of shared memory that HopperForwardMemory of kernels/attention/hopper.h takes."""
    key, value = _line_bytes(size, value_size)
    stage = key_tile(size, value_size) * (key + value)
    held = ROWS * key if _in_memory(key, value) else 0
    return held + _stages(held, stage) * stage + _BARRIERS


@lru_cache
def queries_bytes(size: int, value_size: int) -> int:
    """Return the bytes of shared memory that HopperQueriesMemory takes."""
    key, value = _line_bytes(size, value_size)
    held = ROWS * (key + value) if _in_memory(key, value) else 0
    stages = _stages(held, TILE * (key + value))
    return held + (stages * (key + value) if stages > 1 else 2 * key + value) * TILE + _BARRIERS


@lru_cache
def keys_bytes(size: int, value_size: int) -> int:
    """Return the bytes of shared memory that HopperKeysMemory takes."""
    key, value = _line_bytes(size, value_size)
    stage = TILE * (key + value)
    held = key_tile(size, value_size) * (key + value) + 2 * TILE * TILE * 4
    return held + _stages(held, stage) * stage + _BARRIERS


def _line_bytes(size: int, value_size: int) -> tuple[int, int]:
    """Return the bytes of a packed row of keys, and of one of values."""
    return 2 * (-(-size // 64) * 64), 2 * (-(-value_size // 64) * 64)


def _in_memory(key: int, value: int) -> bool:
    """Whether the rows that a block keeps throughout are in shared memory; narrow ones are in registers."""
    return max(key, value) > 2 * _NARROW


def _stages(taken: int, stage: int) -> int:
    """Return how many stages of `stage` bytes fit in addition to `taken` bytes, at most 4."""
    return min(4, (_MOST - _BARRIERS - taken) // stage)


def _padded(length: int) -> int:
    return -(-length // ROWS) * ROWS


FORWARD = HopperKernel(
    name="attention_hopper_forward",
    files=_FILES,
    values=(*_VALUES, "WITH_SINKS"),
    arrays=("q", "k", "v", "numbers", "sinks", "starts", "ends", "y", "sums"),
    memory="HopperForwardMemory",
    bytes=forward_bytes,
)
QUERIES = HopperKernel(
    name="attention_hopper_queries",
    files=_FILES,
    values=_VALUES,
    arrays=("q", "k", "v", "dy", "sums", "delta", "numbers", "starts", "ends", "dq"),
    memory="HopperQueriesMemory",
    bytes=queries_bytes,
)
KEYS = replace(
    QUERIES,
    name="attention_hopper_keys",
    arrays=(*QUERIES.arrays[:-1], "dk", "dv"),
    memory="HopperKeysMemory",
    bytes=keys_bytes,
)
PACK = Kernel(
    name="attention_hopper_pack",
    files=_FILES,
    values=("In", "D", "DV", "HEIGHT", "GRADIENTS"),
    sizes=("q_shape[0] * q_shape[1]", "k_shape[0] * k_shape[1]", "q_shape[2]", "k_shape[2]"),
    arrays=("q", "k", "v", "dy", "y", "packed_q", "packed_k", "packed_v", "packed_dy", "delta"),
    memory="HopperPackMemory",
    memory_values=("In",),
    bounded=True,
)
