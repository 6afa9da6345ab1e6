"""One token of each row of a gated-delta layer, from its projections to its output projection, as one kernel.

Upstream decodes a token by some twenty operations: the convolution joins and cuts its window, queries and keys are
normed, gates are computed, the recurrence takes a step, and its output is normed and gated. They take far longer to
launch than to compute. The kernel reads and writes the recurrence's state once, which is all that takes time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from ..causal_conv import causal_conv
from ..gated_delta.naive import gated_delta_naive
from ..kernels.launch import Device, Kernel, Plan
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator
from ..operator.measure import random_arrays
from ..pointwise import gating
from ..pointwise.conv import TAPS, NormedHeads
from ..recomputation import is_small_case, note

# The supported sizes of a key's head: its lanes, eight elements each, are a power of two within a group of 32.
KEY_SIZES = (16, 32, 64, 128, 256)
# Groups of 32 lanes in a block.
GROUPS = 4
KERNEL = Kernel(
    name="delta_token",
    files=("passes/pointwise.h", "decoding/delta_token.h"),
    values=("GROUPS", "KEY", "VALUE", "RATIO", "TAPS"),
    arrays=(
        *("numbers", "x", "z", "a", "b", "before", "state", "taps", "A_log", "dt_bias", "weight"),
        *("y", "after", "next"),
    ),
    memory="DeltaTokenMemory",
    memory_values=("GROUPS", "KEY", "VALUE"),
)
# The largest error that a trial allows over the largest element: seven steps round to the dtype, in turn.
BOUNDS = {mx.float32: 2.0**-16, mx.float16: 2.0**-7, mx.bfloat16: 2.0**-4}


@dataclass(frozen=True)
class DeltaToken:
    """The sizes and constants of a layer.

    Attributes:
        heads: Its queries and keys, and their norms.
        value_heads: How many heads of values it has, a multiple of those of keys.
        value_size: The elements of a value's head.
        output_eps: The epsilon added to the mean of an output's squares.
    """

    heads: NormedHeads
    value_heads: int
    value_size: int
    output_eps: float

    @property
    def channels(self) -> int:
        """The channels of the convolution."""
        return 2 * self.heads.channels + self.value_heads * self.value_size

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The widths of the projections: x, z, b and a."""
        return self.channels, self.value_heads * self.value_size, self.value_heads, self.value_heads


@dataclass(frozen=True)
class TokenArrays:
    """The arrays of one token of each row.

    `projected` are the outputs of the layer's projections, beside one another as one array [B, C + Hv Dv + 2 Hv] or by
    themselves: x [B, C], the queries, keys and values before their convolution; z [B, Hv Dv], the gate of the output; b
    [B, Hv]; and a [B, Hv]. `before` [B, K - 1, C] are the convolution's inputs before x, oldest first; `state` is [B,
    Hv, Dv, Dk] fp32, `taps` [C, K], `A_log` [Hv] fp32, `dt_bias` [Hv], and `weight` [Dv], that of the output's norm.
    """

    projected: tuple[mx.array, ...]
    before: mx.array
    state: mx.array
    taps: mx.array
    A_log: mx.array
    dt_bias: mx.array
    weight: mx.array

    @property
    def named(self) -> dict[str, mx.array]:
        """All arrays, by the names that they have in the kernel's text."""
        names = ("projected",) if len(self.projected) == 1 else ("x", "z", "b", "a")
        others = {name: array for name, array in vars(self).items() if name != "projected"}
        return dict(zip(names, self.projected, strict=True)) | others

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the layer's arrays."""
        return self.before.dtype


def delta_token(layer: DeltaToken, arrays: TokenArrays) -> list[mx.array]:
    """Return the layer's output before its last projection, and the arrays that the next token needs.

    They are the output [B, Hv Dv], the convolution's last inputs, as `before`, and the state; the projections and
    `before` have one dtype. `serves` says whether arrays fit. Source: `GatedDeltaNet` of
    mlx_lm/models/qwen3_5.py, for one token.
    """
    if is_small_case():
        note("delta token")
        return delta_token_naive(layer, arrays)
    rows, before, _ = arrays.before.shape
    whole = len(arrays.projected) == 1
    dtypes = [array.dtype for array in (arrays.before, arrays.taps, arrays.dt_bias, arrays.weight)]
    return KERNEL(arrays.named, _plan(layer, rows, before + 1, whole, *dtypes))


def delta_token_naive(layer: DeltaToken, arrays: TokenArrays) -> list[mx.array]:
    """Compute the same by the operations of a whole row."""
    heads = layer.heads
    rows = arrays.before.shape[0]
    dtype = arrays.dtype
    x, z, b, a = (part[:, None] for part in _parts(layer, arrays.projected))
    y = causal_conv(x, arrays.taps, initial_state=arrays.before)
    y = (y * mx.sigmoid(y)).astype(dtype)
    *normed, v = mx.split(y, [heads.channels, 2 * heads.channels], axis=-1)
    q, k = (mx.unflatten(part, -1, (heads.count, heads.size)) for part in normed)
    q, k = (
        (factor * mx.fast.rms_norm(part.astype(mx.float32), None, heads.eps)).astype(dtype)
        for part, factor in ((q, heads.query_factor), (k, heads.key_factor))
    )
    log_g = gating.log_gate(arrays.A_log, a.astype(mx.float32), arrays.dt_bias, None)
    beta = mx.sigmoid(b.astype(mx.float32))
    v = mx.unflatten(v, -1, (layer.value_heads, layer.value_size))
    out, state = gated_delta_naive(q, k, v, log_g, beta, initial_state=arrays.state)
    z = mx.unflatten(z[:, 0], -1, (layer.value_heads, layer.value_size)).astype(mx.float32)
    out = mx.fast.rms_norm(out[:, 0].astype(dtype), arrays.weight, layer.output_eps).astype(mx.float32)
    after = mx.concatenate([arrays.before, x], axis=1)[:, 1:]
    return [(out * z * mx.sigmoid(z)).astype(dtype).reshape(rows, -1), after, state]


def covers(layer: DeltaToken, arrays: TokenArrays) -> bool:
    """Whether the kernel can compute with arrays of these shapes and dtypes."""
    supported = layer.heads.size in KEY_SIZES and arrays.taps.shape[-1] in TAPS and layer.value_size >= 8
    return supported and _fits(layer, arrays)


def _fits(layer: DeltaToken, arrays: TokenArrays) -> bool:
    heads = layer.heads
    rows = arrays.before.shape[0]
    taps = arrays.taps.shape[-1]
    whole = len(arrays.projected) == 1
    shapes = {
        **({"projected": (rows, sum(layer.widths))} if whole else _by_name(layer, rows)),
        "before": (rows, taps - 1, layer.channels),
        "state": (rows, layer.value_heads, layer.value_size, heads.size),
        "taps": (layer.channels, taps),
        "A_log": (layer.value_heads,),
        "dt_bias": (layer.value_heads,),
        "weight": (layer.value_size,),
    }
    named = arrays.named
    if named.keys() != shapes.keys() or any(named[name].shape != shape for name, shape in shapes.items()):
        return False
    of_one = {array.dtype for array in (*arrays.projected, arrays.before)}
    others = {arrays.taps.dtype, arrays.dt_bias.dtype, arrays.weight.dtype}
    wide = arrays.state.dtype == arrays.A_log.dtype == mx.float32
    alike = wide and len(of_one) == 1 and (of_one | others) <= BOUNDS.keys()
    return alike and layer.value_heads % heads.count == 0 and rows > 0


def serves(layer: DeltaToken, arrays: TokenArrays) -> bool:
    """Whether the kernel is to be used: it covers the arrays, is faster, and was found right on this machine."""
    if is_small_case():
        return _fits(layer, arrays)
    if not covers(layer, arrays):
        return False
    named = arrays.named
    dtypes = tuple((name, named[name].dtype) for name in ("before", "taps", "dt_bias", "weight"))
    form = len(arrays.projected) == 1, arrays.taps.shape[1]
    return OPERATOR.serves(layer, *form, dtypes)


def _by_name(layer: DeltaToken, rows: int) -> dict[str, tuple[int, ...]]:
    return {name: (rows, width) for name, width in zip(("x", "z", "b", "a"), layer.widths, strict=True)}


def _parts(layer: DeltaToken, projected: tuple[mx.array, ...]) -> list[mx.array]:
    """x, z, b and a by themselves."""
    ends = [sum(layer.widths[: i + 1]) for i in range(3)]
    return list(projected if len(projected) == 4 else mx.split(projected[0], ends, axis=-1))


@lru_cache(maxsize=256)
def _plan(layer: DeltaToken, rows: int, taps: int, whole: bool, dtype: mx.Dtype, *others: mx.Dtype) -> Plan:
    heads, widths = layer.heads, layer.widths
    places = {name: f"projected + {sum(widths[:i])}" for i, name in enumerate(("x", "z", "b", "a"))} if whole else {}
    strides = (sum(widths),) * 3 if whole else widths[:3]
    floats = (heads.query_factor, heads.key_factor, heads.eps, layer.output_eps)
    numbers = ", ".join([*(f"{number!r}f" for number in floats), *map(str, strides)])
    return Plan(
        outputs={
            "y": ((rows, widths[1]), dtype),
            "after": ((rows, taps - 1, layer.channels), dtype),
            "next": ((rows, layer.value_heads, layer.value_size, heads.size), mx.float32),
        },
        values={
            "GROUPS": GROUPS,
            "KEY": heads.size,
            "VALUE": layer.value_size,
            "RATIO": layer.value_heads // heads.count,
            "TAPS": taps,
        },
        blocks=(layer.value_heads, rows, 1),
        groups=GROUPS,
        sizes=(str(layer.value_heads),),
        written={"numbers": f"DeltaTokenNumbers{{{numbers}}}"} | places,
    )


def trial_case(layer: DeltaToken, whole: bool, taps: int, dtypes: tuple[tuple[str, mx.Dtype], ...]) -> Case[Device]:
    """Return the case of three rows: open, usual and closed gates, and states that are no zeros."""
    named = dict(dtypes)
    rows = 3
    heads = layer.value_heads
    kinds = {
        **{name: (shape, named["before"]) for name, shape in _by_name(layer, rows).items()},
        "before": ((rows, taps - 1, layer.channels), named["before"]),
        "state": ((rows, heads, layer.value_size, layer.heads.size), mx.float32),
        "taps": ((layer.channels, taps), named["taps"]),
        "A_log": ((heads,), mx.float32),
        "dt_bias": ((heads,), named["dt_bias"]),
        "weight": ((layer.value_size,), named["weight"]),
    }
    *parts, before, state, filters, A_log, dt_bias, weight = random_arrays(list(kinds.values()))
    # Row 0 has gates near 1, row 1 usual ones, and row 2 gates near 0.
    parts[3] = parts[3] + mx.array([-9.0, 0.0, 30.0]).astype(before.dtype)[:, None]
    projected = (mx.concatenate(parts, axis=-1),) if whole else tuple(parts)
    arrays = TokenArrays(projected, before, state, filters, A_log, dt_bias, weight)
    wide = [array.astype(mx.float32) for array in (before, state, filters, A_log, dt_bias, weight)]
    exact = TokenArrays(tuple(part.astype(mx.float32) for part in projected), *wide)
    return Case(
        name=f"a token of a gated-delta layer ({layer.value_heads} heads, {layer.heads.size} x {layer.value_size})",
        results=("y", "inputs of the convolution", "state"),
        call=by_kernels(lambda: delta_token(layer, arrays)),
        truth=lambda: delta_token_naive(layer, exact),
        bound=BOUNDS[before.dtype],
        bounds={"inputs of the convolution": 2.0**-24},
        like=[*parts, before, state],
    )


OPERATOR = KernelOperator("a token of a gated-delta layer", trial_case, devices=("cuda", "metal"))
