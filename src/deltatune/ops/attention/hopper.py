"""The launches of Hopper's own kernels for bf16 and fp16, which keep its tensor cores busy.

The kernels are in ops/kernels/attention/hopper.h, which explains their outputs; fused_op.py calls the functions here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import mlx.core as mx

from ..kernels.launch import HOPPER_WORDS, Arrays, Kernel, Outputs, Plan
from . import fused
from .fused import WIDEST, FusedOptions, Shape, factors

# The queries of a block; the rows of a packed tile; the groups of 32 threads in a block, and in one of the kernel that
# packs.
ROWS = 128
TILE = 64
GROUPS = 12
PACK_GROUPS = 8
# The widest heads for which a block takes 128 keys at a time.
_NARROW = 128
_FILES = (*HOPPER_WORDS, *fused.FILES, "attention/hopper.h")
_VALUES = ("In", "D", "DV", "HEIGHT", "CAUSAL", "WINDOW", "SEGMENTED")


FORWARD = Kernel(
    name="attention_hopper_forward",
    files=_FILES,
    values=(*_VALUES, "WITH_SINKS"),
    sizes=tuple(f"lengths[{i}]" for i in range(4)),
    inputs=("q", "k", "v", "sinks", "starts", "ends", "numbers", "lengths"),
    arrays=("q", "k", "v", "numbers", "sinks", "starts", "ends", "y", "sums"),
    memory="HopperForwardMemory",
    memory_values=("In", "D", "DV", "HEIGHT"),
    bounded=True,
)
QUERIES = replace(
    FORWARD,
    name="attention_hopper_queries",
    values=_VALUES,
    inputs=("q", "k", "v", "dy", "delta", "sums", "starts", "ends", "numbers", "lengths"),
    arrays=("q", "k", "v", "dy", "sums", "delta", "numbers", "starts", "ends", "dq"),
    memory="HopperQueriesMemory",
)
KEYS = replace(
    QUERIES,
    name="attention_hopper_keys",
    arrays=(*QUERIES.arrays[:-1], "dk", "dv"),
    memory="HopperKeysMemory",
)
PACK = Kernel(
    name="attention_hopper_pack",
    files=_FILES,
    values=("In", "D", "DV", "HEIGHT", "GRADIENTS"),
    sizes=("q_shape[0] * q_shape[1]", "k_shape[0] * k_shape[1]", "q_shape[2]", "k_shape[2]"),
    inputs=("q", "k", "v", "dy", "y"),
    arrays=("q", "k", "v", "dy", "y", "packed_q", "packed_k", "packed_v", "packed_dy", "delta"),
    memory="HopperPackMemory",
    memory_values=("In",),
    bounded=True,
)


def unsupported(options: FusedOptions, q: mx.array, v: mx.array) -> str | None:
    """Return why these kernels cannot serve a call with arrays of one dtype, or None where they can."""
    if q.dtype not in (mx.bfloat16, mx.float16):
        return f"q is {q.dtype}, and tensor cores take bfloat16 or float16"
    if q.shape[3] % 8 or v.shape[3] % 8 or max(q.shape[3], v.shape[3]) > WIDEST:
        return f"heads of {q.shape[3]} x {v.shape[3]} are not multiples of 8 up to {WIDEST}"
    if options.scale <= 0:
        return f"the scale {options.scale} is not positive"
    return None


def forward(options: FusedOptions, x: Arrays) -> list[mx.array]:
    """Compute y and, for each row, the log2 of the sum of 2^score [B, Hq, Tq rounded up to a multiple of 128]."""
    height = key_tile(x)
    return _launch(FORWARD, options, x, x | packed(x, height), height)


def backward(options: FusedOptions, x: Arrays) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Compute dq, dk, dv, and the inner product of each row of y with that of dy, in the shape of `sums`.

    The arrays are those of the call, and dy, y and the sums.
    """
    arrays = x | packed(x, TILE)
    (dq,) = _launch(QUERIES, options, x, arrays, TILE)
    dk, dv = _launch(KEYS, options, x, arrays, key_tile(x))
    return dq, dk, dv, arrays["delta"]


def packed(x: Arrays, height: int) -> Arrays:
    """Copy q, k and v into tiles, and return them by name.

    Zeros fill the rows up to a multiple of 128 and the columns up to a multiple of 64. A tile of k or v has `height`
    rows. If there are dy and y, dy is packed too, and the inner products of their rows are returned as `delta`
    [B, Hq, rows].
    """
    plan = _pack_plan("dy" in x, height, x["q"].dtype, x["q"].shape, x["k"].shape, x["v"].shape)
    return {name.removeprefix("packed_"): array for name, array in zip(plan.outputs, PACK(x, plan), strict=True)}


@lru_cache(maxsize=256)
def _pack_plan(gradients: bool, height: int, dtype: mx.Dtype, *shapes: Shape) -> Plan:
    (batch, heads, queries, size), (_, key_heads, keys, _), (*_, value_size) = shapes
    of_queries, of_keys = (batch, heads, _padded(queries)), (batch, key_heads, _padded(keys))
    columns, value_columns = (-(-n // 64) * 64 for n in (size, value_size))
    kinds: dict[str, Shape] = {"q": (*of_queries, columns), "k": (*of_keys, columns), "v": (*of_keys, value_columns)}
    if gradients:
        kinds["dy"] = (*of_queries, value_columns)
    outputs: Outputs = {f"packed_{name}": (shape, dtype) for name, shape in kinds.items()}
    if gradients:
        outputs["delta"] = (of_queries, mx.float32)
    rows = batch * heads * of_queries[2] * (2 if gradients else 1) + 2 * batch * key_heads * of_keys[2]
    return Plan(
        outputs=outputs,
        values={"In": dtype, "D": size, "DV": value_size, "HEIGHT": height, "GRADIENTS": gradients},
        blocks=(rows // TILE, 1, 1),
        groups=PACK_GROUPS,
    )


def _launch(kernel: Kernel, options: FusedOptions, x: Arrays, arrays: Arrays, height: int) -> list[mx.array]:
    """Run a kernel on the packed `arrays` of the call `x`; a tile of keys has `height` rows."""
    q, k = x["q"].shape, x["k"].shape
    # The sizes that a kernel cannot read from the shapes of packed arrays.
    others = {"numbers": factors(options.scale), "lengths": _lengths(q[1], k[1], q[2], k[2])}
    return kernel(arrays | others, _plan(kernel, options, height, x["q"].dtype, q, k, x["v"].shape))


@lru_cache(maxsize=256)
def _plan(kernel: Kernel, options: FusedOptions, height: int, dtype: mx.Dtype, *shapes: Shape) -> Plan:
    q, k, v = shapes
    rows, heads, unit = (k[2], k[1], height) if kernel is KEYS else (q[2], q[1], ROWS)
    kinds: Outputs = {"y": ((*q[:3], v[3]), dtype), "sums": ((*q[:2], _padded(q[2])), mx.float32)}
    kinds |= {"dq": (q, dtype), "dk": (k, dtype), "dv": (v, dtype)}
    return Plan(
        outputs={name: kinds[name] for name in kernel.arrays if name not in kernel.inputs},
        values=options.values(dtype, *shapes) | {"HEIGHT": height},
        blocks=(heads, q[0], _padded(rows) // unit),
        groups=GROUPS,
    )


@lru_cache(maxsize=256)
def _lengths(*values: int) -> mx.array:
    """Return an array of these numbers: the same at every call."""
    return mx.array(values, mx.int32)


def key_tile(x: Arrays) -> int:
    """Return how many keys a block takes at a time, as its memory and registers allow."""
    return 128 if max(x["q"].shape[3], x["v"].shape[3]) <= _NARROW else 64


def _padded(length: int) -> int:
    return -(-length // ROWS) * ROWS
