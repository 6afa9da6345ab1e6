"""Rows sorted by expert once a block, and cut into tiles of one expert each, in shapes that no value decides.

How many rows an expert gets is data, which a compiled graph cannot read. So each expert's rows are padded to whole
tiles of m rows: at most (R + n (m - 1)) / m tiles for R rows on n experts, whatever the routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..pointwise import rows as pointwise_rows
from . import grouped, product_trial


class Chunk(NamedTuple):
    """Some tiles. Rows of padding repeat some other row, and have `valid` 0."""

    number: int
    experts: mx.array  # [t], ascending
    source: mx.array  # [t m]: the token of each row
    pair: mx.array  # [t m]: its place in the flattened indices [N k]
    valid: mx.array | None  # [t m] fp32
    # Where tiles are single rows: [E] int32, the rows of experts up to each; and [t], the row of each of its pairs.
    ends: mx.array | None = None
    place: mx.array | None = None


class Tiled:
    """For a CPU: tiles of m rows, one BLAS call each; results are added up row by row, always in the same order."""

    def __init__(self, pairs: int, top_k: int, experts: int, tile: int, tiles_at_once: int):
        self.pairs, self.top_k, self.experts = pairs, top_k, experts
        self.tile, self.tiles_at_once = tile, tiles_at_once
        used = min(experts, pairs)
        self.count = (pairs + used * (tile - 1)) // tile

    def sort(self, indices: mx.array) -> list[mx.array]:
        """Of indices [N, k]: the tiles' experts, then for each row its token, its pair and whether it is valid."""
        tile, flat = self.tile, indices.reshape(-1)
        order = mx.argsort(flat)
        rows = mx.zeros(self.experts, mx.int32).at[flat].add(mx.array(1, mx.int32))
        tiles = (rows + (tile - 1)) // tile
        ends = mx.cumsum(tiles)
        numbers = mx.arange(self.count)
        mine = mx.minimum((ends[None] <= numbers[:, None]).sum(axis=1), self.experts - 1)
        inside = ((numbers - (ends - tiles)[mine]) * tile)[:, None] + mx.arange(tile)
        place = (mx.cumsum(rows) - rows)[mine][:, None] + inside
        valid = (inside < rows[mine][:, None]).astype(mx.float32)
        pair = order[mx.minimum(place, self.pairs - 1)]
        return [mine.astype(mx.uint32), pair // self.top_k, pair, valid]

    @property
    def chunks(self) -> int:
        return -(-self.count // self.tiles_at_once)

    def chunk(self, placed: Sequence[mx.array], number: int, after: list[mx.array]) -> Chunk:
        """Tiles of one chunk of what `sort` gave, not to be looked at before `after` is there."""
        start = number * self.tiles_at_once
        part = slice(start, start + self.tiles_at_once)
        experts, *rows = placed
        parts = [experts[part], *(each[part].reshape(-1) for each in rows)]
        return Chunk(number, *(mx.depends(parts, after) if after else parts))

    def laid_out(self, x: mx.array, rows: mx.array) -> mx.array:
        """x [n, D] as tiles [t, m, D]."""
        return x[rows].reshape(-1, self.tile, x.shape[-1])

    def add_to_tokens(self, total: mx.array, tiles: mx.array, chunk: Chunk, scores: mx.array | None = None) -> mx.array:
        """total [N, D] plus each row of the tiles [t, m, D] at its token, times its score of [N k] if there are."""
        if scores is not None:
            tiles = tiles * scores_of(scores, chunk)
        return _added(total, chunk.source, tiles.reshape(-1, tiles.shape[-1]))

    def add_to_pairs(self, total: mx.array, tiles: mx.array, chunk: Chunk) -> mx.array:
        """total [N k, ...] plus each row of the tiles at its pair; rows of padding must be zero."""
        return _added(total, chunk.pair, tiles.reshape(-1, *total.shape[1:]))

    def add_products(
        self, total: mx.array, left: mx.array, right: mx.array, chunk: Chunk, scale: mx.array | float | None = None
    ) -> mx.array:
        """total [E, a, b] plus scale times each expert's sum over its rows of left [t, m, a] times right [t, m, b]."""
        right = right if scale is None else scale * right
        return _added(total, chunk.experts, left.swapaxes(-1, -2) @ right)


class Sorted:
    """For a GPU: tiles of one row, in sorted order, a chunk of tokens at a time; no atomic sums."""

    tile = 1

    def __init__(self, tokens: int, top_k: int, experts: int, tokens_at_once: int):
        self.tokens, self.top_k = tokens, top_k
        self._experts, self._at_once = experts, tokens_at_once

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self._at_once)

    def sort(self, indices: mx.array) -> list[mx.array]:
        """The indices [N, k]: each chunk is sorted by itself."""
        return [indices]

    def chunk(self, placed: Sequence[mx.array], number: int, after: list[mx.array]) -> Chunk:
        """As Tiled.chunk."""
        start, stop = self._span(number)
        flat = placed[0][start:stop].reshape(-1)
        if after:
            flat = mx.depends([flat], after)[0]
        order = mx.argsort(flat)
        pair = order + start * self.top_k
        experts = flat[order].astype(mx.uint32)
        ends = (experts[None] <= mx.arange(self._experts)[:, None]).sum(axis=1)
        return Chunk(number, experts, pair // self.top_k, pair, None, ends, mx.argsort(order))

    def laid_out(self, x: mx.array, rows: mx.array) -> mx.array:
        """As Tiled.laid_out."""
        return pointwise_rows.taken(x, rows)[:, None]

    def add_to_tokens(self, total: mx.array, tiles: mx.array, chunk: Chunk, scores: mx.array | None = None) -> mx.array:
        """As Tiled.add_to_tokens."""
        start, stop = self._span(chunk.number)
        assert chunk.place is not None
        place = chunk.place.reshape(-1, self.top_k)
        if scores is not None:
            scores = scores[start * self.top_k : stop * self.top_k].astype(mx.float32).reshape(place.shape)
        rows = tiles.reshape(tiles.shape[0], -1)
        sums = pointwise_rows.combined(rows, place, scores, total.dtype)
        if stop - start == self.tokens:
            return sums
        total[start:stop] = sums
        return total

    def add_to_pairs(self, total: mx.array, tiles: mx.array, chunk: Chunk) -> mx.array:
        """As Tiled.add_to_pairs."""
        assert chunk.place is not None
        start, stop = self._span(chunk.number)
        rows = tiles.reshape(tiles.shape[0], -1)[chunk.place]
        total[start * self.top_k : stop * self.top_k] = rows.reshape(-1, *total.shape[1:])
        return total

    def add_products(
        self, total: mx.array, left: mx.array, right: mx.array, chunk: Chunk, scale: mx.array | float | None = None
    ) -> mx.array:
        """As Tiled.add_products."""
        assert chunk.ends is not None
        left, right = left.squeeze(1), right.squeeze(1)
        if product_trial.on_gradient(left, right):
            return grouped.gradient(total, left, right, chunk.ends, 1.0 if scale is None else scale)
        starts = mx.concatenate([mx.zeros(1, mx.int32), chunk.ends[:-1]])
        segments = mx.stack([starts, chunk.ends], axis=1).astype(mx.uint32)
        left, right = left.astype(mx.float32), right.astype(mx.float32)
        return total + mx.segmented_mm(left.T, right if scale is None else scale * right, segments)

    def _span(self, number: int) -> tuple[int, int]:
        return number * self._at_once, min(self.tokens, (number + 1) * self._at_once)


def scores_of(scores: mx.array, chunk: Chunk) -> mx.array:
    """Of scores [N k] those of the chunk's rows: [t, m, 1] fp32, 0 for rows of padding."""
    each = scores[chunk.pair].astype(mx.float32)
    if chunk.valid is not None:
        each = each * chunk.valid
    return each.reshape(chunk.experts.size, -1, 1)


def _added(total: mx.array, rows: mx.array, values: mx.array) -> mx.array:
    """total with values added at rows, fp32. MLX's scatter costs by the element, so two numbers go as a complex one."""
    if total.ndim == 1 or total.shape[-1] % 2:
        return total.at[rows].add(values)
    pairs = total.view(mx.complex64).at[rows].add(values.view(mx.complex64))
    return pairs.view(mx.float32)


def tile_rows(pairs: int, experts: int, matrix_cost: float) -> int:
    """Rows of a tile: sqrt(rows an expert gets on average x what a tile costs beyond its rows, in rows).

    Padding costs about E m rows, and R / m tiles cost `matrix_cost` rows each: their sum is least there.
    """
    best = (pairs / experts * matrix_cost) ** 0.5
    step = 8 if best >= 8 else 1
    most = max(1, pairs // min(experts, pairs))
    return max(1, min(round(best / step) * step, -(-most // step) * step * 4, 256))
