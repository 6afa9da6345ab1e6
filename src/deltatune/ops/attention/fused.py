"""The launches of the fused kernels of attention: one kernel forward and three or four backward, for every dtype.

The kernels are in ops/kernels/attention/attention.h, which explains their outputs; fused_op.py calls the functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import e, log2

import mlx.core as mx

from ..kernels.launch import Arrays, Blocks, Kernel, Launch, Outputs, Values, numbers

# A block computes TILE queries by TILE keys with GROUPS groups of 32 lanes, and loads PIECE columns of an operand at a
# time.
TILE, GROUPS, PIECE = 32, 4, 64
# The widest heads for which the results fit in a block's registers.
WIDEST = 256
# The tiles of dk and dv that a lane of an Apple GPU has registers for beside the rest (docs/reference/metal.md).
_TILES_ON_METAL = 10
# The threadgroup memory with which three blocks share an Apple GPU's core, taking an M1's 60 KB. Operands that a block
# reads in each step are held in it where they fit.
_HELD_BYTES = 20 * 1024
LOG2E = log2(e)
# The files of the bodies, and the compile-time values that every kernel but DELTA takes first.
FILES = ("attention/attention.h",)
_VALUES = ("In", "D", "DV", "PIECE", "SIDES", "SQUARES", "HELD", "CAUSAL", "WINDOW", "SEGMENTED")

FORWARD = Kernel(
    name="attention_forward",
    files=FILES,
    values=(*_VALUES, "WITH_SINKS"),
    sizes=("q_shape[1]", "k_shape[1]", "q_shape[2]", "k_shape[2]"),
    arrays=("q", "k", "v", "numbers", "sinks", "starts", "ends", "y", "sums"),
    memory="AttentionMemory",
    memory_values=("In", "PIECE", "SIDES", "SQUARES", "held_columns(HELD, D, DV)"),
)
QUERIES = replace(
    FORWARD,
    name="attention_queries",
    values=_VALUES,
    arrays=("q", "k", "v", "dy", "sums", "delta", "numbers", "starts", "ends", "dq"),
)
KEYS = replace(
    QUERIES,
    name="attention_keys",
    values=(*_VALUES, "TO_KEYS", "TO_VALUES"),
    arrays=(*QUERIES.arrays[:-1], "dk", "dv"),
)
# The same for one of the two gradients alone.
KEYS_ALONE = replace(QUERIES, name="attention_keys_alone", arrays=(*QUERIES.arrays[:-1], "dk"))
VALUES_ALONE = replace(QUERIES, name="attention_values_alone", arrays=(*QUERIES.arrays[:-1], "dv"))
DELTA = Kernel(
    name="attention_delta",
    files=FILES,
    values=("In", "DV"),
    sizes=("y_shape[0] * y_shape[1] * y_shape[2]",),
    arrays=("y", "dy", "delta"),
    memory="DeltaMemory",
    memory_values=("In",),
)


@dataclass(frozen=True)
class FusedOptions:
    """The arguments of a call that are no arrays, and whether it has segments and sinks."""

    scale: float
    causal: bool
    window: int | None
    segmented: bool
    with_sinks: bool

    def window_of(self, keys: int) -> int:
        """Return the window, or 0 if it hides none of this number of keys."""
        return self.window if self.window is not None and self.window < keys else 0


@dataclass(frozen=True)
class Operands:
    """The arrays of a call: q, k, v, the sinks [Hq] in fp32, and the bounds of each key's segment [B, Tk]."""

    q: mx.array
    k: mx.array
    v: mx.array
    sinks: mx.array | None
    starts: mx.array | None
    ends: mx.array | None

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes of a key head and of a value head."""
        return self.q.shape[3], self.v.shape[3]

    def named(self) -> Arrays:
        """Return the arrays that the call has, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def forward(options: FusedOptions, x: Operands, machine: str) -> Launch:
    """Return the launch that writes y and, for each row, the log2 of the sum of 2^score [B, Hq, Tq]."""
    batch, heads, queries, _ = x.q.shape
    outputs: Outputs = {"y": ((batch, heads, queries, x.sizes[1]), x.q.dtype), "sums": (x.q.shape[:3], mx.float32)}
    inputs = {"q": x.q, "k": x.k, "v": x.v, "numbers": factors(options.scale)} | x.named()
    return _launch(FORWARD, options, x, machine, inputs, outputs, (_tiles(queries), heads, batch))


def delta(x: Operands, y: mx.array, dy: mx.array) -> Launch:
    """Return the launch that writes delta, the inner product of each row of y with that of dy [B, Hq, Tq]."""
    rows = y.size // y.shape[3]
    return Launch(
        kernel=DELTA,
        inputs={"y": y, "dy": dy},
        outputs={"delta": (y.shape[:3], mx.float32)},
        values={"In": y.dtype, "DV": y.shape[3]},
        blocks=(-(-rows // GROUPS), 1, 1),
        bytes=16,
        groups=GROUPS,
    )


def queries(options: FusedOptions, x: Operands, dy: mx.array, sums: mx.array, delta: mx.array, machine: str) -> Launch:
    """Return the launch that writes dq; `sums` is the second output of `forward`."""
    blocks = _tiles(x.q.shape[2]), x.q.shape[1], x.q.shape[0]
    inputs = _gradient_inputs(options, x, dy, sums, delta)
    return _launch(QUERIES, options, x, machine, inputs, {"dq": (x.q.shape, x.q.dtype)}, blocks)


def keys(options: FusedOptions, x: Operands, dy: mx.array, sums: mx.array, delta: mx.array, machine: str) -> Launch:
    """Return the launch that writes dk and dv; `sums` is the second output of `forward`."""
    outputs: Outputs = {"dk": (x.k.shape, x.k.dtype), "dv": (x.v.shape, x.v.dtype)}
    return _of_keys(KEYS, options, x, _gradient_inputs(options, x, dy, sums, delta), outputs, machine)


def keys_alone(
    options: FusedOptions, x: Operands, dy: mx.array, sums: mx.array, delta: mx.array, machine: str
) -> Launch:
    """Return the launch that writes dk alone."""
    outputs: Outputs = {"dk": (x.k.shape, x.k.dtype)}
    return _of_keys(KEYS_ALONE, options, x, _gradient_inputs(options, x, dy, sums, delta), outputs, machine)


def values_alone(
    options: FusedOptions, x: Operands, dy: mx.array, sums: mx.array, delta: mx.array, machine: str
) -> Launch:
    """Return the launch that writes dv alone."""
    outputs: Outputs = {"dv": (x.v.shape, x.v.dtype)}
    return _of_keys(VALUES_ALONE, options, x, _gradient_inputs(options, x, dy, sums, delta), outputs, machine)


def alone(x: Operands) -> bool:
    """Whether dk and dv of these heads are launches of their own on Metal, since their sums fill a lane's registers."""
    return 2 * sum(-(-size // PIECE) for size in x.sizes) > _TILES_ON_METAL


def _of_keys(
    kernel: Kernel, options: FusedOptions, x: Operands, inputs: Arrays, outputs: Outputs, machine: str
) -> Launch:
    blocks = _tiles(x.k.shape[2]), x.k.shape[1], x.k.shape[0]
    return _launch(kernel, options, x, machine, inputs, outputs, blocks)


def _gradient_inputs(options: FusedOptions, x: Operands, dy: mx.array, sums: mx.array, delta: mx.array) -> Arrays:
    arrays = {name: array for name, array in x.named().items() if name != "sinks"}
    return arrays | {"dy": dy, "sums": sums, "delta": delta, "numbers": factors(options.scale)}


def _launch(
    kernel: Kernel, options: FusedOptions, x: Operands, machine: str, inputs: Arrays, outputs: Outputs, blocks: Blocks
) -> Launch:
    size, value_size = x.sizes
    values: Values = {"In": x.q.dtype, "D": size, "DV": value_size, "PIECE": PIECE, "CAUSAL": options.causal}
    values |= {"WINDOW": options.window_of(x.k.shape[2]), "SEGMENTED": options.segmented}
    values |= {"WITH_SINKS": options.with_sinks, "TO_KEYS": True, "TO_VALUES": True}
    memory = memory_of(kernel, x.q.dtype, x.sizes, machine)
    values |= {"SIDES": memory.sides, "SQUARES": memory.squares, "HELD": memory.held}
    return Launch(
        kernel=kernel,
        inputs=inputs,
        outputs=outputs,
        values={name: values[name] for name in kernel.values},
        blocks=blocks,
        bytes=memory.bytes,
        groups=GROUPS,
    )


@dataclass(frozen=True)
class Memory:
    """The shared memory of a block, as AttentionMemory of kernels/attention/attention.h lays it out.

    Attributes:
        sides: The operands that are loaded piece by piece at a time.
        squares: The matrices of weights and of gradients of scores.
        held: How many of the block's own operands stay there.
        bytes: All of it.
    """

    sides: int
    squares: int
    held: int
    bytes: int


@cache
def memory_of(kernel: Kernel, dtype: mx.Dtype, sizes: tuple[int, int], machine: str) -> Memory:
    """Return the shared memory of a block of `kernel`: on Metal, with as many own operands as fit beside others."""
    exact, squares = (4 if machine == "cuda" and dtype == mx.float16 else dtype.size), 2
    # The forward pass and dv need the block's queries or keys alone, the others also its dy or values.
    operands = 1 if kernel in (FORWARD, VALUES_ALONE) else 2
    if machine == "metal":
        squares = 2 if kernel is KEYS else 1

    def made(held: int) -> Memory:
        sides = 1 if held == operands else 2
        columns = sum(-(-size // 16) * 16 + 8 for size in sizes[:held])
        rows = TILE * (sides * (PIECE + 8) + columns) * exact
        return Memory(sides, squares, held, rows + squares * TILE * (TILE + 8) * 4 + 6 * TILE * 4 + 16)

    counts = range(operands, 0, -1) if machine == "metal" else ()
    return next((memory for memory in map(made, counts) if memory.bytes <= _HELD_BYTES), made(0))


def _tiles(length: int) -> int:
    return -(-length // TILE)


def factors(scale: float) -> mx.array:
    """Return the factor of the scores, which are exponents of 2, and the factor of dq and dk."""
    return numbers(scale * LOG2E, scale)
