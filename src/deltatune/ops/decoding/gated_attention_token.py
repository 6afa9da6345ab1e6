"""One token of each row of a gated attention layer, from its projections to its output projection, as one kernel.

Upstream decodes a token by some twenty operations: norms, rotary turns, the places of the key and the value among those
of the row, attention and the gate. MLX also copies all keys and values of a batch to add one of each row to them, where
a step is started before the one before it is done; the kernel writes the token's own where they belong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import mlx.core as mx

from ..kernels.launch import Device, Kernel, Plan
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator
from ..operator.measure import random_arrays
from ..pointwise.heads import ROTARY, frequencies
from ..recomputation import is_small_case
from .attention_token import MOST_HEADS, SIZES

# Groups of 32 lanes in a block.
GROUPS = 8
KERNEL = Kernel(
    name="gated_attention_token",
    files=(
        *("passes/pointwise.h", "passes/heads.h"),
        *("decoding/attention_token.h", "decoding/gated_attention_token.h"),
    ),
    values=("GROUPS", "HEADS", "RATIO", "SIZE", "ROTARY"),
    arrays=(
        *("numbers", "q", "k", "v", "q_weight", "k_weight", "frequencies"),
        *("keys", "values", "offsets", "y"),
    ),
    memory="AttentionTokenMemory",
    memory_values=("GROUPS", "HEADS", "SIZE"),
    bounded=True,
)
# The largest error that a trial allows over the largest element: five steps round to the dtype, in turn.
BOUNDS = {mx.float32: 2.0**-16, mx.float16: 2.0**-7, mx.bfloat16: 2.0**-4}


@dataclass(frozen=True)
class GatedAttention:
    """The sizes and constants of a layer.

    Attributes:
        heads: Its heads of queries, a multiple of those of keys.
        key_heads: Its heads of keys and of values.
        size: The elements of a head.
        q_eps, k_eps: The epsilons added to the means of the squares of queries and of keys.
        rotary_dims: How many elements of a head turn.
        base: That of the angles.
        scale: That of the scores.
    """

    heads: int
    key_heads: int
    size: int
    q_eps: float
    k_eps: float
    rotary_dims: int
    base: float
    scale: float

    @property
    def widths(self) -> tuple[int, int, int]:
        """The widths of the projections: the queries with their gates, the keys, and the values."""
        of_keys = self.key_heads * self.size
        return 2 * self.heads * self.size, of_keys, of_keys


@dataclass(frozen=True)
class RowArrays:
    """The arrays of one token of each row.

    Attributes:
        projected: The outputs of the layer's projections, beside one another as one array [B, 1, C], or by themselves:
            each query followed by its gate [B, 1, 2 Hq D], the keys [B, 1, Hk D], and the values.
        q_weight: [D], that of the norm of queries.
        k_weight: [D], that of the norm of keys.
        keys: [B, Hk, T, D], those of the row's tokens before, with room for T.
        values: [B, Hk, T, D].
        offsets: [B] int32: how many tokens the row has. A row that has T gets its token into the last place.
    """

    projected: tuple[mx.array, ...]
    q_weight: mx.array
    k_weight: mx.array
    keys: mx.array
    values: mx.array
    offsets: mx.array

    @property
    def named(self) -> dict[str, mx.array]:
        """All arrays, by the names that they have in the kernel's text."""
        names = ("projected",) if len(self.projected) == 1 else ("q", "k", "v")
        others = {name: array for name, array in vars(self).items() if name != "projected"}
        return dict(zip(names, self.projected, strict=True)) | others


def gated_attention_token(layer: GatedAttention, arrays: RowArrays) -> mx.array:
    """Return the layer's output before its last projection, [B, 1, Hq D], and put the token into keys and values.

    The arrays `keys` and `values` are changed themselves, so nothing else may hold them, and whoever reads them next
    has to wait for this output. `serves` says whether arrays fit. Source: `Qwen3NextAttention` of
    mlx_lm/models/qwen3_next.py, for one token.
    """
    inputs = arrays.named | {"frequencies": frequencies(layer.rotary_dims, layer.base)}
    dtypes = [array.dtype for array in (arrays.keys, arrays.q_weight, arrays.k_weight)]
    return KERNEL(inputs, _plan(layer, arrays.keys.shape, len(arrays.projected) == 1, *dtypes))[0]


def gated_attention_token_naive(layer: GatedAttention, arrays: RowArrays) -> list[mx.array]:
    """Compute the same by MLX's operations; return the output, and keys and values with the token's own."""
    q, k, v = arrays.projected if len(arrays.projected) == 3 else mx.split(arrays.projected[0], _ends(layer), axis=-1)
    rows, capacity = arrays.keys.shape[0], arrays.keys.shape[2]
    q, gate = mx.split(q.reshape(rows, 1, layer.heads, -1), 2, axis=-1)
    k, v = (x.reshape(rows, 1, layer.key_heads, layer.size).swapaxes(1, 2) for x in (k, v))
    q = mx.fast.rms_norm(q, arrays.q_weight, layer.q_eps).astype(v.dtype).swapaxes(1, 2)
    k = mx.fast.rms_norm(k, arrays.k_weight, layer.k_eps).astype(v.dtype)
    q, k = (
        mx.fast.rope(x, layer.rotary_dims, traditional=False, base=layer.base, scale=1.0, offset=arrays.offsets)
        for x in (q, k)
    )
    at = mx.arange(capacity)[None, None, :, None] == mx.minimum(arrays.offsets, capacity - 1)[:, None, None, None]
    keys, values = mx.where(at, k, arrays.keys), mx.where(at, v, arrays.values)
    seen = mx.arange(capacity) <= arrays.offsets[:, None, None, None]
    y = mx.fast.scaled_dot_product_attention(q, keys, values, scale=layer.scale, mask=seen)
    return [(y.swapaxes(1, 2) * mx.sigmoid(gate)).reshape(rows, 1, -1), keys, values]


def covers(layer: GatedAttention, arrays: RowArrays) -> bool:
    """Whether the kernel can compute with arrays of these shapes and dtypes."""
    keys = arrays.keys
    whole = len(arrays.projected) == 1
    if keys.ndim != 4 or not keys.size or layer.size not in SIZES or layer.rotary_dims not in ROTARY:
        return False
    rows = keys.shape[0]
    widths = [sum(layer.widths)] if whole else layer.widths
    of_rows = (rows, layer.key_heads, keys.shape[2], layer.size)
    expected = [
        *((array, (rows, 1, width)) for array, width in zip(arrays.projected, widths, strict=True)),
        *((array, of_rows) for array in (keys, arrays.values)),
        *((array, (layer.size,)) for array in (arrays.q_weight, arrays.k_weight)),
        (arrays.offsets, (rows,)),
    ]
    of_one = {array.dtype for array in (*arrays.projected, keys, arrays.values)}
    weights = {arrays.q_weight.dtype, arrays.k_weight.dtype}
    alike = len(of_one) == 1 and (of_one | weights) <= BOUNDS.keys() and arrays.offsets.dtype == mx.int32
    fits = layer.rotary_dims <= layer.size and layer.heads % layer.key_heads == 0
    return alike and fits and all(array.shape == shape for array, shape in expected)


def serves(layer: GatedAttention, arrays: RowArrays) -> bool:
    """Whether the kernel is to be used: it covers the arrays, is faster, and was found right on this machine."""
    if is_small_case() or not covers(layer, arrays):
        return False
    dtypes = arrays.keys.dtype, arrays.q_weight.dtype, arrays.k_weight.dtype
    return OPERATOR.serves(layer, len(arrays.projected) == 1, dtypes)


def _ends(layer: GatedAttention) -> list[int]:
    return [layer.widths[0], sum(layer.widths[:2])]


@lru_cache(maxsize=256)
def _plan(layer: GatedAttention, keys: tuple[int, ...], whole: bool, dtype: mx.Dtype, *others: mx.Dtype) -> Plan:
    widths = layer.widths
    ratio = layer.heads // layer.key_heads
    together = math.gcd(ratio, MOST_HEADS)
    strides = (sum(widths),) * 3 if whole else widths
    floats = layer.q_eps, layer.k_eps, layer.scale * math.log2(math.e)
    numbers = ", ".join([*(f"{number!r}f" for number in floats), *map(str, strides)])
    names = ("q", "k", "v") if whole else ()
    places = {name: f"projected + {place}" for name, place in zip(names, (0, *_ends(layer)), strict=False)}
    return Plan(
        outputs={"y": ((keys[0], 1, layer.heads * layer.size), dtype)},
        values={
            "GROUPS": GROUPS,
            "HEADS": together,
            "RATIO": ratio,
            "SIZE": layer.size,
            "ROTARY": layer.rotary_dims,
        },
        blocks=(layer.heads // together, keys[0], 1),
        groups=GROUPS,
        sizes=(str(layer.heads), "keys_shape[2]"),
        written={"numbers": f"GatedTokenNumbers{{{numbers}}}"} | places,
        changes=("keys", "values"),
    )


def trial_case(layer: GatedAttention, whole: bool, dtypes: tuple[mx.Dtype, mx.Dtype, mx.Dtype]) -> Case[Device]:
    """Return the case of rows without a token, with a few, and with more than a block reads at a time."""
    dtype, *of_weights = dtypes
    rows = 4
    capacity = 4 * GROUPS * 256 // layer.size + 3
    shapes = [*((rows, 1, width) for width in layer.widths), *[(rows, layer.key_heads, capacity, layer.size)] * 2]
    *parts, keys, values = random_arrays([(shape, dtype) for shape in shapes])
    q_weight, k_weight = random_arrays([((layer.size,), of_weight) for of_weight in of_weights])
    offsets = mx.array([0, 7, capacity - 1, capacity + 2], mx.int32)
    # Values behind a row's last key must not matter, but are finite, since the definition multiplies them by zero.
    projected = (mx.concatenate(parts, axis=-1),) if whole else tuple(parts)

    def wide(array: mx.array) -> mx.array:
        return array.astype(mx.float32)

    def call() -> list[mx.array]:
        # Sums are arrays of their own, which the kernel has changed once its output is there.
        copied = replace(arrays, keys=keys + 0, values=values + 0)
        y = gated_attention_token(layer, copied)
        mx.eval(y)
        return [y, copied.keys, copied.values]

    arrays = RowArrays(projected, q_weight, k_weight, keys, values, offsets)
    others = {name: wide(array) for name, array in vars(arrays).items() if name not in ("projected", "offsets")}
    exact = RowArrays(projected=tuple(map(wide, projected)), offsets=offsets, **others)
    return Case(
        name=f"a token of a gated attention layer ({layer.heads} heads to {layer.key_heads} of {layer.size}, {dtype})",
        results=("y", "keys", "values"),
        call=by_kernels(call),
        truth=lambda: gated_attention_token_naive(layer, exact),
        bound=BOUNDS[dtype],
        bounds={"values": 2.0**-24},
        like=[*parts, keys, values],
    )


OPERATOR = KernelOperator("a token of a gated attention layer", trial_case)
