"""Remembers the last short convolution of a layer in training, for the nn.silu that follows it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..machine import backend
from ..ops.recomputation import keeps_inputs_alone


@dataclass(frozen=True)
class Convolution:
    """The output `y` [B, T, C] of a causal convolution, and the arguments that it was computed from.

    Attributes:
        y: The output.
        x: The input [B, K - 1 + T, C].
        weight: The filters [C, K].
        segments: The documents that it kept separate, [B, T], or None.
    """

    y: mx.array
    x: mx.array
    weight: mx.array
    segments: mx.array | None


# The last convolution, until the next call of nn.silu.
_last: Convolution | None = None


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
    global _last
    serves = (backend.device() == "cuda" or keeps_inputs_alone()) and layer.training and "bias" not in layer
    _last = Convolution(y, x, layer.weight[..., 0], segments) if serves else None
    return y


def taken(y: mx.array) -> Convolution | None:
    """Return the last convolution if `y` is its output, and forget it."""
    global _last
    last, _last = _last, None
    return last if last is not None and last.y is y else None
