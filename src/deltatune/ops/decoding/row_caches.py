"""The caches of a batch's rows while it is decoded, in the place of mlx-lm's caches. Rows have different lengths.

All of it is arrays, and no shape depends on how many tokens there were, so that a step over all layers can be compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..pieces import States
from ..tracing import trace


class _RowLengths(NamedTuple):
    """The origin of an attention mask of one token a row: how many keys each row sees, [B] int32."""

    lengths: mx.array


def lengths_of(mask: object) -> mx.array | None:
    """Return how many keys each row sees, [B] int32, where AttentionRows made this very mask; else None."""
    row_lengths = trace.current().known.of(mask, _RowLengths) if isinstance(mask, mx.array) else None
    return row_lengths and row_lengths.lengths


class RecurrentRows(States):
    """The states of a recurrent layer, [B, ...] each, in the place of mlx-lm's ArraysCache."""

    @property
    def handed(self) -> list[mx.array]:
        """The states as the layer has left them: a step of one token computes hardly more than they hold."""
        return [array for array in self.arrays if array is not None]

    def make_mask(self, tokens: int) -> None:
        """Say that no token of a row is padding."""


class AttentionRows:
    """The keys and values [B, heads, T, D] of an attention layer, with room for T, in the place of mlx-lm's KVCache.

    `offset` [B] int32 counts the tokens of each row. A row that has T keeps its last token's place.
    """

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array):
        self.handed = [keys, values]
        self.offset = offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take the key and value of one more token of each row; return those that there is room for."""
        place = mx.minimum(self.offset, self.handed[0].shape[2] - 1)[:, None, None, None]
        self.handed = [
            mx.put_along_axis(old, mx.broadcast_to(place, new.shape), new.astype(old.dtype), axis=2)
            for old, new in zip(self.handed, (keys, values), strict=True)
        ]
        return self.handed[0], self.handed[1]

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return which keys the next token of each row sees, [B, 1, 1, T]; attention need not read it.

        More than one token, or a window, is a ValueError.
        """
        if tokens != 1 or window_size is not None:
            raise ValueError(f"AttentionRows: one token a row and no window, got {tokens} and {window_size}.")
        room = self.handed[0].shape[2]
        lengths = mx.minimum(self.offset + 1, room)
        mask = (mx.arange(room) < lengths[:, None])[:, None, None]
        trace.current().known.note(mask, _RowLengths(lengths))
        return mask
