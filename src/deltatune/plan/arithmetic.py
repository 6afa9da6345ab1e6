"""Counts the operations of a step's matrix products, and measures how fast this machine computes such products."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import mlx.core as mx

from .graph import Node

# By kind of primitive: the position of the input that is summed over its last axis.
_PRODUCTS = {"Matmul": 0, "AddMM": 0, "GatherMM": 0, "QuantizedMatmul": 0, "GatherQMM": 0}
# Enough rows, summed elements and columns to be as fast as it gets. More take longer to measure, and a vocabulary's
# matrix would take gigabytes.
_MOST = (1024, 8192, 8192)


@dataclass(frozen=True)
class Products:
    """The matrix products of a step: multiplications and additions, without those of kernels of our own.

    `largest` are rows, summed length and columns of the product that most of the operations are in.
    """

    operations: int = 0
    largest: tuple[int, int, int] | None = None

    def times(self, tokens: float) -> Products:
        """Those of a step with so many times the tokens."""
        largest = None if self.largest is None else (int(self.largest[0] * tokens), *self.largest[1:])
        return Products(int(self.operations * tokens), largest)


def products(order: Iterable[Node], times: Iterable[int] = repeat(1)) -> Products:
    """Return the matrix products among the primitives of a graph, each of which counts so many times."""
    operations: Counter[tuple[int, int, int]] = Counter()
    for node, count in zip(order, times, strict=False):
        if node.kind in _PRODUCTS and node.size:
            inner = node.inputs[_PRODUCTS[node.kind]].shape[-1]
            columns = node.shape[-1]
            operations[node.size // columns, inner, columns] += 2 * node.size * inner * count
    largest = max(operations, key=lambda shape: operations[shape], default=None)
    return Products(operations.total(), largest)


def speed(shape: tuple[int, int, int], dtype: mx.Dtype, seconds: float = 0.3) -> float:
    """Return how many operations a second a product of these rows, summed length and columns does at its best.

    It is measured for so many seconds, and on a part of a size that is larger than need be.
    """
    rows, inner, columns = map(min, shape, _MOST)
    x, w = (mx.random.normal(size, dtype=dtype, key=mx.random.key(0)) for size in ((rows, inner), (columns, inner)))
    mx.eval(x, w, x @ w.T)
    best = float("inf")
    begun = time.perf_counter()
    while best == float("inf") or time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        mx.eval(x @ w.T)
        best = min(best, time.perf_counter() - started)
    return 2 * rows * inner * columns / best
