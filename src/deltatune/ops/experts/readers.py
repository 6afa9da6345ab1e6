"""The outputs of an expert block's first projections, up and in most models gate, which both read its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import mlx.core as mx

from .projection import Projection
from .tiles import Chunk


class InnerRows(NamedTuple):
    """The results for a chunk before the product with down's weight.

    They are the outputs of each reader [t, m, out], and scale * A dropout(x) [t, m, r] of each, and of down where that
    is known; None without an adapter.
    """

    outputs: list[mx.array]
    low_ranks: list[mx.array | None]
    of_down: mx.array | None = None

    @staticmethod
    def of(
        readers: Sequence[Projection], rows: mx.array, chunk: Chunk, matrices: Sequence[mx.array | None]
    ) -> InnerRows:
        """Compute it from the rows without `of_down`, given the projections' unpacked matrices."""
        low_ranks = [p.low_rank(rows, chunk) for p in readers]
        operands = zip(readers, low_ranks, matrices, strict=True)
        return InnerRows([p.forward(rows, low_rank, chunk, matrix) for p, low_rank, matrix in operands], low_ranks)

    def arrays(self) -> list[mx.array]:
        """Return the arrays from which `again` makes it."""
        return [array for array in (*self.outputs, *self.low_ranks, self.of_down) if array is not None]

    @staticmethod
    def again(readers: Sequence[Projection], down: Projection, arrays: Iterator[mx.array]) -> InnerRows:
        """Take its arrays from the iterator."""
        outputs = list(islice(arrays, len(readers)))
        *low_ranks, of_down = [None if p.lora_a is None else next(arrays) for p in (*readers, down)]
        return InnerRows(outputs, low_ranks, of_down)
