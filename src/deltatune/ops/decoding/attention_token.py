"""Attention of one token of each row to the keys and values of its row, where rows of a batch have different lengths.

MLX's attention would take a mask and read the whole capacity of keys; on an NVIDIA GPU it computes and keeps the scores
of all of them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import mlx.core as mx

from ..kernels.launch import Device, Kernel, Plan
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator
from ..operator.measure import random_arrays
from ..recomputation import is_small_case

# The supported head sizes: the lanes of a key, eight elements each, are a power of two within a group of 32.
SIZES = (32, 64, 128, 256)
# Groups of 32 lanes in a block, and the most query heads that it computes.
GROUPS = 4
MOST_HEADS = 4
KERNEL = Kernel(
    name="attention_token",
    files=("passes/pointwise.h", "decoding/attention_token.h"),
    values=("GROUPS", "HEADS", "RATIO", "SIZE"),
    sizes=("q_shape[1]", "keys_shape[2]"),
    arrays=("scale", "q", "keys", "values", "lengths", "y"),
    memory="AttentionTokenMemory",
    memory_values=("GROUPS", "HEADS", "SIZE"),
)
# The largest error that a trial allows over the largest element: a few roundings of the dtype.
BOUNDS = {mx.float32: 2.0**-17, mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6}


def attention_token(q: mx.array, keys: mx.array, values: mx.array, lengths: mx.array, scale: float) -> mx.array:
    """Return softmax(scale q keys^T) values for the first keys of each row, [B, Hq, 1, D], D one of SIZES.

    q is [B, Hq, 1, D], keys and values [B, Hk, T, D] of its dtype, Hq a multiple of Hk; `lengths` [B] int32 counts the
    keys that row b sees, from 1 to T. `serves` says whether arrays fit.
    """
    inputs = {"q": q, "keys": keys, "values": values, "lengths": lengths}
    return KERNEL(inputs, _plan(q.shape, keys.shape, q.dtype, scale))[0]


def attention_token_naive(q: mx.array, keys: mx.array, values: mx.array, lengths: mx.array, scale: float) -> mx.array:
    """Compute the same by its definition, in fp32."""
    ratio = q.shape[1] // keys.shape[1]
    keys, values = (mx.repeat(x.astype(mx.float32), ratio, axis=1) for x in (keys, values))
    scores = scale * (q.astype(mx.float32) @ keys.swapaxes(2, 3))
    seen = mx.arange(keys.shape[2]) < lengths[:, None, None, None]
    return (mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1) @ values).astype(q.dtype)


def covers(q: mx.array, keys: mx.array, values: mx.array, lengths: mx.array) -> bool:
    """Whether the kernel can compute with arrays of these shapes and dtypes."""
    if q.ndim != 4 or keys.ndim != 4 or keys.shape != values.shape or not keys.size:
        return False
    rows, heads, tokens, size = q.shape
    fits = (rows, size) == (keys.shape[0], keys.shape[3]) and tokens == 1 and heads % keys.shape[1] == 0
    alike = q.dtype == keys.dtype == values.dtype and q.dtype in BOUNDS
    return fits and alike and size in SIZES and lengths.shape == (rows,) and lengths.dtype == mx.int32


def serves(q: mx.array, keys: mx.array, values: mx.array, lengths: mx.array) -> bool:
    """Whether the kernel is to be used: it covers the arrays, is faster, and was found right on this machine."""
    if is_small_case() or not covers(q, keys, values, lengths):
        return False
    return OPERATOR.serves(q.shape[1], keys.shape[1], q.shape[3], q.dtype)


@lru_cache(maxsize=256)
def _plan(shape: tuple[int, ...], keys: tuple[int, ...], dtype: mx.Dtype, scale: float) -> Plan:
    rows, heads, _, size = shape
    ratio = heads // keys[1]
    together = math.gcd(ratio, MOST_HEADS)
    return Plan(
        outputs={"y": (shape, dtype)},
        values={"GROUPS": GROUPS, "HEADS": together, "RATIO": ratio, "SIZE": size},
        blocks=(heads // together, rows, 1),
        groups=GROUPS,
        written={"scale": f"{scale * math.log2(math.e)!r}f"},
    )


def trial_case(heads: int, key_heads: int, size: int, dtype: mx.Dtype) -> Case[Device]:
    """Return the case of rows of one key, of a few, and of more than a block reads at a time."""
    rows = 3
    capacity = 4 * GROUPS * 256 // size + 3
    shapes = [(rows, heads, 1, size), (rows, key_heads, capacity, size), (rows, key_heads, capacity, size)]
    q, keys, values = random_arrays([(shape, dtype) for shape in shapes])
    lengths = mx.array([1, 7, capacity], mx.int32)
    scale = size**-0.5
    # Numbers behind a row's last key must not matter.
    behind = mx.arange(capacity)[None, None, :, None] >= lengths[:, None, None, None]
    unread = [mx.where(behind, mx.array(mx.nan, dtype), x) for x in (keys, values)]
    exact = [x.astype(mx.float32) for x in (q, keys, values)]
    return Case(
        name=f"attention of a token to its row ({heads} heads to {key_heads} of {size}, {dtype})",
        results=("y",),
        call=by_kernels(lambda: [attention_token(q, unread[0], unread[1], lengths, scale)]),
        truth=lambda: [attention_token_naive(exact[0], exact[1], exact[2], lengths, scale)],
        bound=BOUNDS[dtype],
        like=(q, keys, values),
    )


OPERATOR = KernelOperator("attention of a token", trial_case, devices=("cuda", "metal"))
