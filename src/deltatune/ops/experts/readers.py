"""The projections of an expert block's rows, up and in most models gate, and their shared sums.

Where their adapters allow it, the products of both adapters with the rows are one product: A of all projections stands
in one array, and so the rows are read once for the adapters instead of once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import mlx.core as mx

from ...machine import backend
from .projection import Projection, product
from .tiles import Chunk


@dataclass(frozen=True)
class Readers:
    """Up and gate, or up alone, with their factors cast (`with_factors_for`).

    `joined` is A of all projections [E, all ranks, in], or None where each multiplies by its own.
    """

    projections: Sequence[Projection]
    joined: mx.array | None

    @staticmethod
    def of(projections: Sequence[Projection]) -> Readers:
        """Join the adapters on an NVIDIA GPU where each A trains, none drops inputs, and their scales are equal."""
        factors = [p.lora_a for p in projections if p.lora_a is not None and "lora_a" in p.trains and not p.dropout]
        alike = {(id(p.scale), p.lora_a.dtype) for p in projections if p.lora_a is not None}
        if backend.device() != "cuda" or len(projections) < 2 or len(factors) < len(projections) or len(alike) > 1:
            return Readers(projections, None)
        return Readers(projections, mx.concatenate(factors, axis=1))

    def low_ranks(self, rows: mx.array, chunk: Chunk) -> list[mx.array | None]:
        """Return of each projection scale * A dropout(x) [t, m, r]."""
        if self.joined is None:
            return [p.low_rank(rows, chunk) for p in self.projections]
        first = self.projections[0]
        together = product(first.adapter_input(rows, chunk.number), self.joined, chunk, True, first.scale)
        return list(mx.split(together, self._ends(), axis=-1))

    def forward(
        self, rows: mx.array, low_ranks: Sequence[mx.array | None], chunk: Chunk, matrices: Sequence[mx.array | None]
    ) -> list[mx.array]:
        """Return y of each projection [t, m, out], given its unpacked matrices and the result of `low_ranks`."""
        operands = zip(self.projections, low_ranks, matrices, strict=True)
        return [p.forward(rows, low_rank, chunk, unpacked) for p, low_rank, unpacked in operands]

    def backward(
        self, d: Sequence[mx.array], chunk: Chunk, matrices: Sequence[mx.array | None]
    ) -> tuple[mx.array, list[mx.array | None]]:
        """Return the gradient of the rows [t, m, in], and that of each A dropout(x), or of all together if joined."""
        d_low_ranks = [p.d_low_rank(d_output, chunk) for p, d_output in zip(self.projections, d, strict=True)]
        factors: list[mx.array | None] = [p.lora_a for p in self.projections]
        if self.joined is not None:
            # The last projection's product adds the adapters of all.
            joined = mx.concatenate([array for array in d_low_ranks if array is not None], axis=-1)
            parts: list[mx.array | None] = [*[None] * (len(d) - 1), joined]
            factors[-1] = self.joined
        else:
            joined, parts = None, d_low_ranks
        total: mx.array | None = None
        for p, d_output, unpacked, part, factor in zip(self.projections, d, matrices, parts, factors, strict=True):
            total = p.backward(d_output, part, chunk, unpacked, total, factor)
        assert total is not None
        return total, d_low_ranks if joined is None else [joined]

    def parts(self, gradient: mx.array) -> list[mx.array]:
        """Return the gradient of each A, given that of `joined`."""
        return list(mx.split(gradient, self._ends(), axis=1))

    def _ends(self) -> list[int]:
        """Where the ranks of one projection end, for all but the last."""
        ends, end = [], 0
        for p in self.projections[:-1]:
            assert p.lora_a is not None
            end += p.lora_a.shape[1]
            ends.append(end)
        return ends


class InnerRows(NamedTuple):
    """The results for a chunk before the product with down's weight.

    They are the outputs of each reader [t, m, out], and scale * A dropout(x) [t, m, r] of each, and of down where that
    is known; None without an adapter.
    """

    outputs: list[mx.array]
    low_ranks: list[mx.array | None]
    of_down: mx.array | None = None

    @staticmethod
    def of(readers: Readers, rows: mx.array, chunk: Chunk, matrices: Sequence[mx.array | None]) -> InnerRows:
        """Compute it from the rows without `of_down`, given the projections' unpacked matrices."""
        low_ranks = readers.low_ranks(rows, chunk)
        return InnerRows(readers.forward(rows, low_ranks, chunk, matrices), low_ranks)

    def arrays(self) -> list[mx.array]:
        """Return the arrays from which `again` makes it."""
        return [array for array in (*self.outputs, *self.low_ranks, self.of_down) if array is not None]

    @staticmethod
    def again(readers: Readers, down: Projection, arrays: Iterator[mx.array]) -> InnerRows:
        """Take its arrays from the iterator."""
        outputs = list(islice(arrays, len(readers.projections)))
        *low_ranks, of_down = [None if p.lora_a is None else next(arrays) for p in (*readers.projections, down)]
        return InnerRows(outputs, low_ranks, of_down)
