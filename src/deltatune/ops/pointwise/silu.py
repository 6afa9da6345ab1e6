"""The activation silu(gate) * x of MLPs and experts."""

from __future__ import annotations

import mlx.core as mx

from ..kernels.launch import Launch
from ..operator.kernel_operator import KernelWorkload
from ..recomputation import large_enough
from .passes import Arrays, Passes, by_lane, pieces_of


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x, computed in fp32, with one kernel forward and one backward, where `serves` is true."""
    return _PASSES(gate, x)[0]


def serves(gate: mx.array, x: mx.array) -> bool:
    """Whether `swiglu` is to be used: the kernels cover these arrays, are faster, and were found right here."""
    fits = gate.shape == x.shape and gate.dtype == x.dtype and gate.size % 8 == 0 < gate.size
    fits = fits and mx.issubdtype(gate.dtype, mx.floating)
    return fits and large_enough(gate) and _PASSES.passes_trial(*[((2, 48, 8), gate.dtype)] * 2)


def _plain(gate: mx.array, x: mx.array) -> Arrays:
    return [gate * mx.sigmoid(gate) * x]


def _forward(gate: mx.array, x: mx.array) -> Launch:
    inputs, outputs = {"gate": gate, "x": x}, {"y": (gate.shape, gate.dtype)}
    return by_lane("swiglu_forward", inputs, outputs, (pieces_of("gate", gate),), gate.size // 8)


def _backward(gate: mx.array, x: mx.array, dy: mx.array) -> Launch:
    inputs = {"gate": gate, "x": x, "dy": dy.astype(gate.dtype)}
    outputs = dict.fromkeys(("dgate", "dx"), (gate.shape, gate.dtype))
    return by_lane("swiglu_backward", inputs, outputs, (pieces_of("gate", gate),), gate.size // 8)


_PASSES = Passes("swiglu", _forward, _backward, _plain)


def workloads(quick: bool) -> list[KernelWorkload]:
    """Return the workloads that the self-test compares with float64."""
    return _PASSES.workloads("swiglu", [(6, 256) if quick else (4096, 4096)] * 2)
