"""Decides how the input of a checkpointed layer is cut into the pieces on which the layer runs (pieces.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..machine import backend
from .tracing.turns import Turn, turns

# The smallest size of a piece of the layer's input. Smaller pieces hold less, and larger ones make better products.
PIECE_BYTES = {"cpu": 4 * 2**20, "metal": 8 * 2**20, "cuda": 16 * 2**20}
# An NVIDIA GPU with more memory than this many smallest pieces has larger ones: launching pieces takes time.
PIECES_IN_MEMORY = 2048
# Pieces of whole rows are so many times larger. Three of them took an H100 12 % longer than the whole batch.
ROWS_TIMES = {"cpu": 1, "metal": 1, "cuda": 2}
# A batch of more pieces has larger ones, since each piece makes the graph of a step larger.
MOST_PIECES = 32
# The axes of x [B, T, D].
ROWS = 0
TOKENS = 1


@dataclass(frozen=True)
class LayerCut:
    """How x [B, T, D] is cut: into whole rows (ROWS), or into pieces with a part of every row (TOKENS).

    `bounds` are where pieces begin and end along the axis, from 0 to its length.
    """

    axis: int
    bounds: tuple[int, ...]

    def spans(self, *, inner: bool = False) -> list[Turn]:
        """Return where each piece begins and ends; the trace of a plan has the last piece alone of an `inner` layer."""
        # The second piece of a row gets something of the first, and the one before the last gives something to it.
        ends = 2 if self.axis == TOKENS else 1
        return turns(self.bounds, 0, 1) if inner else turns(self.bounds, ends, ends)

    def part(self, x: mx.array, span: Sequence[int]) -> mx.array:
        """Return the part of x [B, T, ...] that belongs to a piece."""
        part = slice(*span[:2])
        return x[part] if self.axis == ROWS else x[:, part]


def piece_bytes() -> int:
    """Return the size of a piece of the layer's input on this device."""
    return max(backend.here(PIECE_BYTES), backend.gpu_memory() // PIECES_IN_MEMORY if backend.has_own_memory() else 0)


def layer_cut(x: mx.array) -> LayerCut | None:
    """Return how x [B, T, D] is cut: into pieces of nearly equal size, or None for one that is not worth cutting.

    It is cut from two pieces of piece_bytes() on. Pieces of whole rows hand nothing on, and so they take less time than
    pieces of the same size that have a part of every row; these serve where one row alone is two pieces.
    """
    batch, length, width = x.shape
    row = length * width * x.dtype.size
    if row < 2 * piece_bytes():
        pieces = min(MOST_PIECES, batch, batch * row // (piece_bytes() * backend.here(ROWS_TIMES)))
        return LayerCut(ROWS, _bounds(batch, -(-batch // pieces))) if pieces > 1 else None
    pieces = min(MOST_PIECES, length // max(1, length * piece_bytes() // (batch * row)))
    size = -(-length // pieces)
    # Whole chunks of gated delta and whole tiles of attention leave no rest in any piece but the last.
    return LayerCut(TOKENS, _bounds(length, -(-size // 128) * 128 if size > 128 else size))


def _bounds(length: int, size: int) -> tuple[int, ...]:
    return *range(0, length, size), length
