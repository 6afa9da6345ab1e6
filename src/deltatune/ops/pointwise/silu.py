"""silu(gate) x, as MLPs and experts have it."""

from __future__ import annotations

import mlx.core as mx

from .pass_launch import Execute, Pass
from .passes import LEAST, Arrays, Passes


def swiglu(gate: mx.array, x: mx.array, *, execute: Execute = Pass.run) -> mx.array:
    """silu(gate) x, in one pass forward and one backward.

    Args:
        gate, x: floats of one shape and dtype, a multiple of 8 of them.

    Returns the same shape and dtype; computed in fp32. Raises ValueError for arrays that `covers` refuses.
    """
    if not covers(gate, x):
        found = f"{list(gate.shape)} {gate.dtype} and {list(x.shape)} {x.dtype}"
        raise ValueError(f"swiglu: gate and x must be floats of one shape and dtype, a multiple of 8, got {found}.")
    return _PASSES(gate.reshape(-1, 8), x.reshape(-1, 8), execute=execute)[0].reshape(gate.shape)


def covers(gate: mx.array, x: mx.array) -> bool:
    """Whether the passes can serve these arrays."""
    alike = gate.shape == x.shape and gate.dtype == x.dtype
    return alike and mx.issubdtype(gate.dtype, mx.floating) and gate.size > 0 and gate.size % 8 == 0


def proven(gate: mx.array, x: mx.array) -> bool:
    """Whether the passes cover these arrays, are worth it, and are right on this machine."""
    return gate.size >= LEAST and covers(gate, x) and _PASSES.proven(*[((96, 8), gate.dtype)] * 2)


def _plain(gate: mx.array, x: mx.array) -> Arrays:
    return [gate * mx.sigmoid(gate) * x]


def _forward(gate: mx.array, x: mx.array) -> Pass:
    inputs = {"gate": gate, "x": x}
    return Pass("swiglu_forward", inputs, {"y": (gate.shape, gate.dtype)}, (_COUNT, *inputs, "y"), gate.shape[0])


def _backward(gate: mx.array, x: mx.array, dy: mx.array) -> Pass:
    inputs = {"gate": gate, "x": x, "dy": dy.astype(gate.dtype)}
    outputs = dict.fromkeys(("dgate", "dx"), (gate.shape, gate.dtype))
    return Pass("swiglu_backward", inputs, outputs, (_COUNT, *inputs, *outputs), gate.shape[0])


_COUNT = "(long)gate_shape[0]"
_PASSES = Passes("swiglu", _forward, _backward, _plain)
