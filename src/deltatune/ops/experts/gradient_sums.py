"""The sums over chunks of the gradients of an expert block's arrays: weights, biases, and the adapters' A and B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .projection import Projection
from .tiles import Chunk, Sorted, Tiled

# Of one projection, the sum so far by name; None stands for zeros.
_Sums = dict[str, mx.array | None]


class WithLowRank(NamedTuple):
    """Input rows of a projection [t, m, in], or gradients of its output [t, m, out], and the same of A x [t, m, r]."""

    rows: mx.array
    low_rank: mx.array | None


class GradientSums:
    """The gradients of all arrays that train, in up and gate (`readers`) and in down."""

    def __init__(self, readers: Sequence[Projection], down: Projection, layout: Tiled | Sorted):
        self.readers, self.down, self.layout = readers, down, layout
        self._of_readers: list[_Sums] = [dict.fromkeys(p.trains) for p in readers]
        self._of_down: _Sums = dict.fromkeys(down.trains)

    def arrays(self) -> list[mx.array]:
        """The sums so far."""
        sums = [sum_ for by_name in (*self._of_readers, self._of_down) for sum_ in by_name.values()]
        return [array for array in sums if array is not None]

    def add_down(self, hidden: WithLowRank, d: WithLowRank, chunk: Chunk, score: mx.array) -> None:
        """Add a chunk's part of down's gradients, given its input `hidden` and the gradients `d` of its output.

        `score` [t, m, 1] is a factor of both gradients that they lack so far.
        """
        self._add(self._of_down, self.down, hidden, d, chunk, score)

    def add_readers(
        self,
        rows: mx.array,
        low_ranks: Sequence[mx.array | None],
        d: Sequence[mx.array],
        d_low_ranks: Sequence[mx.array | None],
        chunk: Chunk,
    ) -> None:
        """Add a chunk's part of the gradients of up and gate."""
        for sums, p, low_rank, d_output, d_low_rank in zip(
            self._of_readers, self.readers, low_ranks, d, d_low_ranks, strict=True
        ):
            self._add(sums, p, WithLowRank(rows, low_rank), WithLowRank(d_output, d_low_rank), chunk)

    def by_projection(self) -> list[_Sums]:
        """Return the gradients of up, of down, and of gate if there is one."""
        up, *gate = self._of_readers
        return [up, self._of_down, *gate]

    def _add(
        self,
        sums: _Sums,
        projection: Projection,
        x: WithLowRank,
        d: WithLowRank,
        chunk: Chunk,
        score: mx.array | None = None,
    ) -> None:
        """Add a chunk's part, from the input `x` and the gradients `d`; a score multiplies the smaller factor."""

        def scored(array: mx.array) -> mx.array:
            return array if score is None else (array * score).astype(array.dtype)

        add = self.layout.add_products
        for name, total in sums.items():
            if name == "lora_a":
                assert d.low_rank is not None
                sums[name] = add(total, scored(d.low_rank), projection.adapter_input(x.rows, chunk.number), chunk)
            elif name == "lora_b":
                assert x.low_rank is not None
                sums[name] = add(total, d.rows, scored(x.low_rank), chunk)
            elif name == "weight":
                sums[name] = add(total, d.rows, scored(x.rows), chunk)
            else:
                ones = mx.ones((*d.rows.shape[:2], 1), d.rows.dtype)
                column = None if total is None else total[..., None]
                sums[name] = add(column, d.rows, scored(ones), chunk).squeeze(-1)
