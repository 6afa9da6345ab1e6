"""Carries arrays that a layer computes beside its output through checkpoints and pieces, to whoever collects them.

MLX gives an array that leaves a custom function by another way than its outputs no gradient. So a checkpoint collects
the arrays of its layer, returns them as outputs, and adds them again outside. A row in pieces adds their sums over its
pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from . import trace


def collect(arrays: list[mx.array]) -> None:
    """Add floating-point arrays to those that are collected; nothing happens if nobody collects."""
    collected = trace.current().side_outputs
    if collected is not None:
        collected += arrays


@contextmanager
def collecting(wanted: bool = True) -> Iterator[list[mx.array]]:
    """Within the context, the arguments of collect() are put into the list that the context yields, if `wanted`."""
    collected: list[mx.array] = []
    with trace.having(side_outputs=collected if wanted else None):
        yield collected
