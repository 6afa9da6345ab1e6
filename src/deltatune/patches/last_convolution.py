"""Remembers the last short convolution of a layer in training, for the nn.silu that follows it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..ops.pointwise.passes import OPERATOR as PASSES
from ..ops.recomputation import keeps_inputs_alone
from ..ops.tracing import trace


@dataclass(frozen=True)
class Convolution:
    """The origin of the output [B, T, C] of a causal convolution: its arguments.

    Attributes:
        x: The input [B, K - 1 + T, C].
        weight: The filters [C, K].
        segments: The documents that it kept separate, [B, T], or None.
    """

    x: mx.array
    weight: mx.array
    segments: mx.array | None


def convolved(layer: nn.Module, x: mx.array, y: mx.array, segments: mx.array | None = None) -> mx.array:
    """Remember the output of a causal convolution, where a following nn.silu can be computed together with it.

    Args:
        layer: The convolution.
        x: Its input [B, K - 1 + T, C].
        y: Its output.
        segments: The documents that it kept separate, [B, T], or None.

    Returns:
        y.
    """
    known = trace.current().known
    known.forget(Convolution)
    if (PASSES.is_for_here or keeps_inputs_alone()) and layer.training and "bias" not in layer:
        known.note(y, Convolution(x, layer.weight[..., 0], segments))
    return y


def taken(y: mx.array) -> Convolution | None:
    """Return the last convolution if `y` is its output, and forget it."""
    return trace.current().known.take(y, Convolution)
