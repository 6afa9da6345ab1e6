"""Launches the kernels of kernels/attention.h: one forward, three backward, for any head size and type."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import mlx.core as mx

from ..kernels.launch import Arrays, Launch, Outputs, Values, numbers

# A block's tile: queries and keys; its groups; and how many columns of an operand it stages at a time.
TILE, GROUPS, PIECE = 32, 4, 64
# A head's sizes end where a block's registers do.
WIDEST = 256
LOG2E = log2(e)


@dataclass(frozen=True)
class FusedOptions:
    """What of a call is no array: the scale, which keys are seen, and which arrays come."""

    scale: float
    causal: bool
    window: int | None
    segmented: bool
    sunk: bool

    def window_of(self, keys: int) -> int:
        """The window, or 0 where all of so many keys stand in it."""
        return self.window if self.window is not None and self.window < keys else 0


@dataclass(frozen=True)
class Operands:
    """The arrays of a call: q, k, v; the sinks [HQ] fp32; where each key's segment starts and ends [B, TK]."""

    q: mx.array
    k: mx.array
    v: mx.array
    sinks: mx.array | None
    starts: mx.array | None
    ends: mx.array | None

    @property
    def sizes(self) -> tuple[int, int]:
        """Of a key and of a value."""
        return self.q.shape[3], self.v.shape[3]

    def named(self) -> Arrays:
        return {name: value for name, value in vars(self).items() if value is not None}


def forward(kind: FusedOptions, x: Operands, machine: str) -> Launch:
    """y, and the base-2 logarithm of each row's sum of powers of two [B, HQ, TQ]."""
    batch, heads, queries, _ = x.q.shape
    outputs: Outputs = {"y": ((batch, heads, queries, x.sizes[1]), x.q.dtype), "sums": (x.q.shape[:3], mx.float32)}
    inputs = {"q": x.q, "k": x.k, "v": x.v, "numbers": _numbers(kind, x)} | x.named()
    arguments = ("q", "k", "v", "numbers", _or(x.sinks, "sinks"), *span_arguments(x), *outputs)
    more: Values = {"SUNK": kind.sunk}
    return _launch("attention_forward", kind, x, machine, inputs, outputs, arguments, _tiles(queries), more)


def delta(x: Operands, y: mx.array, dy: mx.array) -> Launch:
    """The sum of products of y's and dy's elements by row [B, HQ, TQ]."""
    rows = y.size // y.shape[3]
    return Launch(
        name="attention_delta",
        memory="DeltaMemory",
        inputs={"y": y, "dy": dy},
        outputs={"delta": (y.shape[:3], mx.float32)},
        values={"In": y.dtype, "DV": y.shape[3]},
        order=("In", "DV"),
        memory_order=("In",),
        blocks=(-(-rows // GROUPS), 1, 1),
        bytes=16,
        groups=GROUPS,
        sizes=("y_shape[0] * y_shape[1] * y_shape[2]",),
    )


def queries(kind: FusedOptions, x: Operands, dy: mx.array, sums: mx.array, delta: mx.array, machine: str) -> Launch:
    """dq."""
    outputs: Outputs = {"dq": (x.q.shape, x.q.dtype)}
    return _gradients("attention_queries", kind, x, (dy, sums, delta), machine, outputs, _tiles(x.q.shape[2]))


def keys(kind: FusedOptions, x: Operands, dy: mx.array, sums: mx.array, delta: mx.array, machine: str) -> Launch:
    """dk and dv."""
    outputs: Outputs = {"dk": (x.k.shape, x.k.dtype), "dv": (x.v.shape, x.v.dtype)}
    return _gradients("attention_keys", kind, x, (dy, sums, delta), machine, outputs, _tiles(x.k.shape[2]))


def _gradients(
    name: str,
    kind: FusedOptions,
    x: Operands,
    given: tuple[mx.array, mx.array, mx.array],
    machine: str,
    outputs: Outputs,
    tiles: int,
) -> Launch:
    read = dict(zip(("dy", "sums", "delta"), given, strict=True))
    spans = {name: value for name, value in x.named().items() if name != "sinks"}
    inputs = spans | read | {"numbers": _numbers(kind, x)}
    arguments = ("q", "k", "v", *read, "numbers", *span_arguments(x), *outputs)
    return _launch(name, kind, x, machine, inputs, outputs, arguments, tiles, {})


def _launch(
    name: str,
    kind: FusedOptions,
    x: Operands,
    machine: str,
    inputs: Arrays,
    outputs: Outputs,
    arguments: tuple[str, ...],
    tiles: int,
    more: Values,
) -> Launch:
    size, value_size = x.sizes
    values: Values = {"In": x.q.dtype, "D": size, "DV": value_size, "PIECE": PIECE, "CAUSAL": kind.causal}
    values |= {"WINDOW": kind.window_of(x.k.shape[2]), "SEGMENTED": kind.segmented} | more
    return Launch(
        name=name,
        memory="AttentionMemory",
        inputs=inputs,
        outputs=outputs,
        values=values,
        order=tuple(values),
        memory_order=("In", "PIECE"),
        blocks=(tiles, x.k.shape[1] if name == "attention_keys" else x.q.shape[1], x.q.shape[0]),
        bytes=shared_bytes(x.q.dtype, machine),
        groups=GROUPS,
        arguments=arguments,
        sizes=("q_shape[1]", "k_shape[1]", "q_shape[2]", "k_shape[2]"),
    )


def shared_bytes(dtype: mx.Dtype, machine: str) -> int:
    """As AttentionMemory of kernels/attention.h lays it out."""
    exact = 4 if machine == "cuda" and dtype == mx.float16 else dtype.size
    return 2 * TILE * (PIECE + 8) * exact + 2 * TILE * (TILE + 8) * 4 + 6 * TILE * 4 + 16


def _tiles(length: int) -> int:
    return -(-length // TILE)


def _numbers(kind: FusedOptions, x: Operands) -> mx.array:
    """What scores in powers of two and gradients are multiplied by."""
    return numbers(kind.scale * LOG2E, kind.scale)


def _or(array: mx.array | None, name: str) -> str:
    return "Nothing{}" if array is None else name


def span_arguments(x: Operands) -> tuple[str, str]:
    """What a kernel takes for the segments' starts and ends."""
    return _or(x.starts, "starts"), _or(x.ends, "ends")
