"""silu(gate) x, and silu(gate) alone."""

from __future__ import annotations

import mlx.core as mx

from .launch import Execute, Pass
from .passes import LEAST, Arrays, Passes


def swiglu(gate: mx.array, x: mx.array | None = None, *, execute: Execute = Pass.run) -> mx.array:
    """silu(gate) x, in one pass forward and one backward.

    Args:
        gate, x: floats of one shape and dtype; without x, silu(gate) = gate / (1 + e^-gate).

    Returns the same shape and dtype; computed in fp32. Raises ValueError for arrays that `covers` refuses.
    """
    if not covers(gate, x):
        raise ValueError(f"swiglu: gate and x must be floats of one shape and dtype, a multiple of 8, got {gate, x}.")
    arrays = [array.reshape(-1, 8) for array in (gate, x) if array is not None]
    return _PASSES[x is not None](*arrays, execute=execute)[0].reshape(gate.shape)


def covers(gate: mx.array, x: mx.array | None = None) -> bool:
    """Whether the passes can serve these arrays."""
    alike = x is None or (gate.shape == x.shape and gate.dtype == x.dtype)
    return alike and mx.issubdtype(gate.dtype, mx.floating) and gate.size > 0 and gate.size % 8 == 0


def proven(gate: mx.array, x: mx.array | None = None) -> bool:
    """Whether the passes cover these arrays, are worth it, and are right on this machine."""
    return (
        gate.size >= LEAST
        and covers(gate, x)
        and _PASSES[x is not None].proven(*[((96, 8), gate.dtype)] * (1 if x is None else 2))
    )


def _plain(gate: mx.array, x: mx.array | None = None) -> Arrays:
    y = gate * mx.sigmoid(gate)
    return [y if x is None else y * x]


def _forward(gate: mx.array, x: mx.array | None = None) -> Pass:
    inputs = {"gate": gate} if x is None else {"gate": gate, "x": x}
    arguments = ("(long)gate_shape[0]", "gate", "Absent{}" if x is None else "x", "y")
    return Pass("swiglu_forward", inputs, {"y": (gate.shape, gate.dtype)}, arguments, gate.shape[0])


def _backward(gate: mx.array, *others: mx.array) -> Pass:
    x, dy = others if len(others) == 2 else (None, others[0])
    inputs = {"gate": gate, **({} if x is None else {"x": x}), "dy": dy.astype(gate.dtype)}
    like = (gate.shape, gate.dtype)
    outputs = {"dgate": like} if x is None else {"dgate": like, "dx": like}
    last = ("Absent{}", "dy", "dgate", "Absent{}") if x is None else ("x", "dy", "dgate", "dx")
    return Pass("swiglu_backward", inputs, outputs, ("(long)gate_shape[0]", "gate", *last), gate.shape[0])


_PASSES = {
    True: Passes("swiglu", _forward, _backward, _plain),
    False: Passes("silu", _forward, _backward, _plain),
}
