"""The fused passes on one piece of a large batch after another, where their saved tensors are recomputed anyway.

Kept are y and the states before the pieces. The backward pass takes the pieces from last to first, runs the forward
kernels of each once more, and joins their gradients. A piece is some whole rows, or a part of one row that begins with
a chunk, and states are handed on in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import mlx.core as mx

from ..recomputation import Input
from .fused_passes import Function, FusedPasses, differentiable
from .tiling import Tiling

# The fewest tokens times value heads of a piece: 8,192 tokens of 32 heads, which fill an NVIDIA GPU.
LEAST = 2**18
# Fewer pieces free too little for the copies of their gradients into one array, and more hold hardly less. Of a batch's
# rows the fewest are best: eight rows one by one took an H100 a tenth longer than two by two, and held more.
FEWEST = 4
MOST = 8
Span = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """How a batch is cut: each piece has the rows and the tokens between two bounds."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]


def cut_of(tiling: Tiling) -> Cut | None:
    """Return how to cut a call that is divided like this; None where it is too small, and on Apple GPUs.

    Parts of rows are cut only from single rows, which lie in one piece of memory.
    """
    pieces = min(MOST, tiling.batch * tiling.length * tiling.value_heads // LEAST)
    if tiling.machine != "cuda" or pieces < FEWEST:
        return None
    if tiling.batch >= FEWEST:
        return Cut(_bounds(tiling.batch, FEWEST, 1), (0, tiling.length))
    return Cut(tuple(range(tiling.batch + 1)), _bounds(tiling.length, -(-pieces // tiling.batch), tiling.chunk))


def _bounds(length: int, parts: int, unit: int) -> tuple[int, ...]:
    size = -(-length // (parts * unit)) * unit
    return *range(0, length, size), length


@dataclass(frozen=True)
class FusedPieces:
    """The passes of a whole call, which run on one piece after another."""

    passes: FusedPasses
    cut: Cut

    def forward(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Return y, the final state, and the states before the pieces but for a row's first. Arguments as of passes."""
        run = replace(self.passes, stateful=True).forward
        rows, last, borders = [], [], []
        done: list[mx.array] = []
        for span in pairwise(self.cut.rows):
            state = self._start(arrays, span)
            row: list[mx.array] = []
            for tokens in pairwise(self.cut.tokens):
                if tokens[0]:
                    state = self._handed(arrays, span, tokens[0], state)
                    borders.append(state)
                y, state, *_ = run(*_after(self._piece(arrays, span, tokens, state), done))
                done = [y]
                row += done
            rows.append(_joined(row, 1))
            last.append(state)
        return _joined(rows, 0), _joined(last, 0), *borders

    def backward(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Return the gradients of the floats, from the inputs, dy, the final state's gradient, and the borders."""
        passes = replace(self.passes, stateful=True)
        spans = list(pairwise(self.cut.tokens))
        dy, d_last, *borders = arrays[self.passes.inputs :]
        rows: list[list[mx.array]] = []
        done: list[mx.array] = []
        for span in reversed(list(pairwise(self.cut.rows))):
            d_state = d_last[slice(*span)]
            row: list[list[mx.array]] = []
            for at, tokens in reversed(list(enumerate(spans))):
                state = borders.pop() if at else self._start(arrays, span)
                piece = _after(self._piece(arrays, span, tokens, state), done)
                _, _, *saved = passes.forward(*piece)
                *done, d_state = passes.backward(*piece, _part(dy, span, tokens), d_state, *saved)
                d_state = self._handed(arrays, span, tokens[0], d_state) if at else d_state
                row.insert(0, done)
            rows.insert(0, [*(_joined(parts, 1) for parts in zip(*row, strict=True)), d_state])
        return tuple(_joined(parts, 0) for parts in zip(*rows, strict=True))[: self.passes.floats]

    def _piece(self, arrays: Sequence[mx.array], rows: Span, tokens: Span, state: mx.array) -> list[mx.array]:
        cut = partial(_part, rows=rows, tokens=tokens)
        return [
            *map(cut, arrays[: self.passes.tokens]),
            state,
            *map(cut, arrays[self.passes.floats : self.passes.inputs]),
        ]

    def _start(self, arrays: Sequence[mx.array], rows: Span) -> mx.array:
        """Return the states with which these rows start."""
        if self.passes.stateful:
            return arrays[self.passes.tokens][slice(*rows)]
        k, v = arrays[1], arrays[2]
        return mx.zeros((rows[1] - rows[0], v.shape[2], v.shape[3], k.shape[3]))

    def _handed(self, arrays: Sequence[mx.array], rows: Span, at: int, state: mx.array) -> mx.array:
        """Return a state or its gradient as it passes the border before token `at`: zeros between two documents."""
        if not self.passes.segmented:
            return state
        segments = arrays[self.passes.inputs - 1][slice(*rows)]
        return mx.where((segments[:, at] == segments[:, at - 1])[:, None, None, None], state, 0.0)


def _part(array: mx.array, rows: Span, tokens: Span) -> mx.array:
    return array[slice(*rows), slice(*tokens)]


def _after(arrays: list[mx.array], done: list[mx.array]) -> list[mx.array]:
    """Return the arrays of a piece, which are there once the piece before is done: two at once would hold more."""
    return list(mx.depends(arrays, done)) if done else arrays


def _joined(parts: Sequence[mx.array], axis: int) -> mx.array:
    return mx.concatenate(list(parts), axis=axis) if len(parts) > 1 else parts[0]


def recomputing_pieces(pieces: FusedPieces, source: Input) -> Function:
    """Return FusedPieces.forward with its gradient. `source` is how the backward pass gets q, k and v."""
    return differentiable(pieces.passes, pieces.forward, pieces.backward, source)
