"""The launches of the fused kernels of attention: one kernel forward and three or four backward, for every dtype.

The kernels are in ops/kernels/attention/attention.h, which explains their outputs; fused_op.py calls the functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import e, log2

import mlx.core as mx

from ..kernels.launch import Arrays, Kernel, Launch, Outputs, Plan, Values, numbers

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
Shape = tuple[int, ...]
# The files of the bodies, and the compile-time values that every kernel but DELTA takes first.
FILES = ("attention/attention.h",)
_VALUES = ("In", "D", "DV", "PIECE", "SIDES", "SQUARES", "HELD", "CAUSAL", "WINDOW", "SEGMENTED")

FORWARD = Kernel(
    name="attention_forward",
    files=FILES,
    values=(*_VALUES, "WITH_SINKS"),
    sizes=("q_shape[1]", "k_shape[1]", "q_shape[2]", "k_shape[2]"),
    inputs=("q", "k", "v", "numbers", "sinks", "starts", "ends"),
    arrays=("q", "k", "v", "numbers", "sinks", "starts", "ends", "y", "sums"),
    memory="AttentionMemory",
    memory_values=("In", "PIECE", "SIDES", "SQUARES", "held_columns(HELD, D, DV)"),
)
QUERIES = replace(
    FORWARD,
    name="attention_queries",
    values=_VALUES,
    inputs=("q", "k", "v", "starts", "ends", "dy", "sums", "delta", "numbers"),
    arrays=("q", "k", "v", "dy", "sums", "delta", "numbers", "starts", "ends", "dq"),
)
KEYS = replace(
    QUERIES,
    name="attention_keys",
    body="attention_keys",
    values=(*_VALUES, "TO_KEYS", "TO_VALUES"),
    arrays=(*QUERIES.arrays[:-1], "dk", "dv"),
)
# The same for one of the two gradients alone: wide heads have more sums than a lane of an Apple GPU has registers.
KEYS_ALONE, VALUES_ALONE = replace(KEYS, name="attention_keys_alone"), replace(KEYS, name="attention_values_alone")
_LEFT_OUT = {KEYS_ALONE: "dv", VALUES_ALONE: "dk"}
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

    def values(self, dtype: mx.Dtype, q: Shape, k: Shape, v: Shape) -> Values:
        """Return the compile-time values of the kernels on every machine, for q, k and v of these shapes."""
        values: Values = {"In": dtype, "D": q[3], "DV": v[3], "CAUSAL": self.causal}
        values |= {"WINDOW": self.window_of(k[2]), "SEGMENTED": self.segmented, "WITH_SINKS": self.with_sinks}
        return values


def launch(kernel: Kernel, options: FusedOptions, x: Arrays, machine: str) -> Launch:
    """Return the launch of a kernel on the arrays of a call.

    These are q, k, v, the sinks [Hq] in fp32 and the bounds of each key's segment [B, Tk], if there are any; backward
    also dy, the sums and delta. FORWARD writes y and, for each row, the log2 of the sum of 2^score [B, Hq, Tq]. QUERIES
    writes dq, and the others dk, dv, or both.
    """
    q = x["q"]
    plan = _plan(kernel, options, machine, q.dtype, q.shape, x["k"].shape, x["v"].shape)
    return kernel.launch(x | {"numbers": factors(options.scale)}, plan)


@lru_cache(maxsize=1024)
def _plan(kernel: Kernel, options: FusedOptions, machine: str, dtype: mx.Dtype, *shapes: Shape) -> Plan:
    q, k, v = shapes
    kinds: Outputs = {"y": ((*q[:3], v[3]), dtype), "sums": (q[:3], mx.float32)}
    kinds |= {"dq": (q, dtype), "dk": (k, dtype), "dv": (v, dtype)}
    rows = q if kernel in (FORWARD, QUERIES) else k
    outputs = [name for name in kernel.arrays if name not in (*kernel.inputs, _LEFT_OUT.get(kernel))]
    values = options.values(dtype, *shapes) | {"PIECE": PIECE, "TO_KEYS": "dk" in outputs, "TO_VALUES": "dv" in outputs}
    return Plan(
        outputs={name: kinds[name] for name in outputs},
        values=values | _memory(kernel, values, machine),
        blocks=(-(-rows[2] // TILE), rows[1], rows[0]),
        groups=GROUPS,
        machine=machine,
    )


def delta(y: mx.array, dy: mx.array) -> mx.array:
    """Return the inner product of each row of y with that of dy [B, Hq, Tq]."""
    plan = Plan(
        outputs={"delta": (y.shape[:3], mx.float32)},
        values={"In": y.dtype, "DV": y.shape[3]},
        blocks=(-(-(y.size // y.shape[3]) // GROUPS), 1, 1),
        groups=GROUPS,
    )
    return DELTA({"y": y, "dy": dy}, plan)[0]


def alone(x: Arrays) -> bool:
    """Whether dk and dv of these heads are launches of their own on Metal, since their sums fill a lane's registers."""
    return 2 * sum(-(-x[name].shape[3] // PIECE) for name in ("q", "v")) > _TILES_ON_METAL


def _memory(kernel: Kernel, values: Values, machine: str) -> Values:
    """Return the values that lay out a block's memory: on Metal, it holds as many own operands as fit beside others.

    SIDES operands are loaded piece by piece at a time; SQUARES are the matrices of weights and of gradients of scores;
    HELD of the block's own operands stay in the memory.
    """
    # The forward pass and dv need the block's queries or keys alone, the others also its dy or values.
    operands = 1 if kernel in (FORWARD, VALUES_ALONE) else 2
    squares = 1 if machine == "metal" and kernel is not KEYS else 2
    for held in range(operands if machine == "metal" else 0, 0, -1):
        memory: Values = {"SIDES": 1 if held == operands else 2, "SQUARES": squares, "HELD": held}
        if kernel.bytes(values | memory, machine) <= _HELD_BYTES:
            return memory
    return {"SIDES": 2, "SQUARES": squares, "HELD": 0}


def factors(scale: float) -> mx.array:
    """Return the factor of the scores, which are exponents of 2, and the factor of dq and dk."""
    return numbers(scale * LOG2E, scale)
