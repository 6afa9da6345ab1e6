"""Sorts the expert block's rows by expert, and cuts them into tiles of one expert each.

The number of rows of an expert is data, which the shapes of a compiled graph cannot depend on. So each expert's rows
are padded to a multiple of m, the rows of a tile: R rows on n experts need at most (R + n (m - 1)) / m tiles, however
they are routed. A pair is a token with one of its k experts, numbered as in the flattened indices [N k].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ...machine import backend
from ..pointwise import rows as pointwise_rows
from . import grouped, trial_case


class Chunk(NamedTuple):
    """The tiles that are computed together. Padding rows repeat another row and have `valid` 0."""

    number: int
    # The expert of each tile, [t], ascending.
    experts: mx.array
    # The token and the pair of each row, [t m].
    token: mx.array
    pair: mx.array
    # 1 for a row and 0 for padding, [t m] fp32; None without padding.
    valid: mx.array | None
    # For tiles of one row: the end of each expert's rows, [E] int32, and the row of each of the chunk's pairs, [t].
    ends: mx.array | None = None
    row_of_pair: mx.array | None = None


class Tiled:
    """The layout for a CPU: tiles of m rows, with one BLAS call each; results are added in a fixed order.

    There are `pairs` = N k rows without padding of `experts` = E experts; `tile` is m.
    """

    def __init__(self, pairs: int, top_k: int, experts: int, tile: int, tiles_per_chunk: int):
        self.pairs, self.top_k, self.experts = pairs, top_k, experts
        self.tile, self.tiles_per_chunk = tile, tiles_per_chunk
        used_experts = min(experts, pairs)
        self.count = (pairs + used_experts * (tile - 1)) // tile

    def sort(self, indices: mx.array) -> list[mx.array]:
        """Sort indices [N, k]; return each tile's expert, and each row's token, pair and validity, as in Chunk."""
        tile, flat = self.tile, indices.reshape(-1)
        order = mx.argsort(flat)
        rows = mx.zeros(self.experts, mx.int32).at[flat].add(mx.array(1, mx.int32))
        tiles = (rows + (tile - 1)) // tile
        tile_ends = mx.cumsum(tiles)
        numbers = mx.arange(self.count)
        expert = mx.minimum((tile_ends[None] <= numbers[:, None]).sum(axis=1), self.experts - 1)
        # The position of each row among its expert's rows, and among all sorted rows.
        in_expert = ((numbers - (tile_ends - tiles)[expert]) * tile)[:, None] + mx.arange(tile)
        in_order = (mx.cumsum(rows) - rows)[expert][:, None] + in_expert
        valid = (in_expert < rows[expert][:, None]).astype(mx.float32)
        pair = order[mx.minimum(in_order, self.pairs - 1)]
        return [expert.astype(mx.uint32), pair // self.top_k, pair, valid]

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.count // self.tiles_per_chunk)

    def chunk(self, routing: Sequence[mx.array], number: int, after: list[mx.array]) -> Chunk:
        """Return a chunk of the tiles of `sort`; its arrays wait until those in `after` are computed."""
        start = number * self.tiles_per_chunk
        part = slice(start, start + self.tiles_per_chunk)
        experts, *rows = routing
        parts = [experts[part], *(array[part].reshape(-1) for array in rows)]
        return Chunk(number, *(mx.depends(parts, after) if after else parts))

    def tiles(self, x: mx.array, rows: mx.array) -> mx.array:
        """Return the given rows [t m] of x [n, D] as tiles [t, m, D]."""
        return x[rows].reshape(-1, self.tile, x.shape[-1])

    def add_to_tokens(self, total: mx.array, tiles: mx.array, chunk: Chunk, scores: mx.array | None = None) -> mx.array:
        """Add each row of the tiles [t, m, D], times its score if scores [N k] are given, to its token in [N, D]."""
        if scores is not None:
            tiles = tiles * scores_of(scores, chunk)
        return _add_rows(total, chunk.token, tiles.reshape(-1, tiles.shape[-1]))

    def add_to_pairs(self, total: mx.array, tiles: mx.array, chunk: Chunk) -> mx.array:
        """Add each row of the tiles to its pair in total [N k, ...]; padding rows must be zero."""
        return _add_rows(total, chunk.pair, tiles.reshape(-1, *total.shape[1:]))

    def add_products(self, total: mx.array | None, left: mx.array, right: mx.array, chunk: Chunk) -> mx.array:
        """Add left^T right, of left [t, m, a] and right [t, m, b], to each tile's expert in total [E, a, b].

        The total may be None, which stands for zeros.
        """
        total = mx.zeros((self.experts, left.shape[-1], right.shape[-1])) if total is None else total
        return _add_rows(total, chunk.experts, left.swapaxes(-1, -2) @ right)


class Sorted:
    """The layout for a GPU: sorted rows without padding, in chunks of tokens, and sums without atomics."""

    tile = 1
    # How many arrays `arrays` returns.
    num_arrays = 5

    def __init__(self, tokens: int, top_k: int, experts: int, tokens_per_chunk: int):
        self.tokens, self.top_k = tokens, top_k
        self._experts, self._tokens_per_chunk = experts, tokens_per_chunk

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.tokens // self._tokens_per_chunk)

    def sort(self, indices: mx.array) -> list[mx.array]:
        """Return the indices [N, k] as they are, since each chunk is sorted by itself."""
        return [indices]

    def chunk(self, routing: Sequence[mx.array], number: int, after: list[mx.array]) -> Chunk:
        """As Tiled.chunk."""
        start, stop = self._span(number)
        flat = routing[0][start:stop].reshape(-1)
        if after:
            flat = mx.depends([flat], after)[0]
        order = mx.argsort(flat)
        pair = order + start * self.top_k
        experts = flat[order].astype(mx.uint32)
        ends = (experts[None] <= mx.arange(self._experts, dtype=mx.uint32)[:, None]).sum(axis=1)
        # The inverse of a permutation.
        row_of_pair = mx.put_along_axis(mx.zeros_like(order), order, mx.arange(order.size, dtype=order.dtype), axis=0)
        return self.again(number, [experts, pair // self.top_k, pair, ends, row_of_pair], [])

    def arrays(self, chunk: Chunk) -> list[mx.array]:
        """Return the arrays of a chunk, from which `again` makes it."""
        assert chunk.ends is not None
        assert chunk.row_of_pair is not None
        return [chunk.experts, chunk.token, chunk.pair, chunk.ends, chunk.row_of_pair]

    def again(self, number: int, arrays: Sequence[mx.array], after: list[mx.array]) -> Chunk:
        """Return the chunk with these `arrays`, which wait until those in `after` are computed."""
        experts, token, pair, ends, row_of_pair = mx.depends(list(arrays), after) if after else arrays
        return Chunk(number, experts, token, pair, None, ends, row_of_pair)

    def tiles(self, x: mx.array, rows: mx.array) -> mx.array:
        """As Tiled.tiles."""
        return pointwise_rows.take_rows(x, rows)[:, None]

    def add_to_tokens(self, total: mx.array, tiles: mx.array, chunk: Chunk, scores: mx.array | None = None) -> mx.array:
        """As Tiled.add_to_tokens."""
        start, stop = self._span(chunk.number)
        assert chunk.row_of_pair is not None
        row_of_pair = chunk.row_of_pair.reshape(-1, self.top_k)
        if scores is not None:
            scores = scores[start * self.top_k : stop * self.top_k].astype(mx.float32).reshape(row_of_pair.shape)
        rows = tiles.reshape(tiles.shape[0], -1)
        sums = pointwise_rows.sum_rows(rows, row_of_pair, scores, total.dtype)
        if stop - start == self.tokens:
            return sums
        total[start:stop] = sums
        return total

    def add_to_pairs(self, total: mx.array, tiles: mx.array, chunk: Chunk) -> mx.array:
        """As Tiled.add_to_pairs."""
        assert chunk.row_of_pair is not None
        start, stop = self._span(chunk.number)
        rows = tiles.reshape(tiles.shape[0], -1)[chunk.row_of_pair]
        total[start * self.top_k : stop * self.top_k] = rows.reshape(-1, *total.shape[1:])
        return total

    def add_products(self, total: mx.array | None, left: mx.array, right: mx.array, chunk: Chunk) -> mx.array:
        """As Tiled.add_products."""
        assert chunk.ends is not None
        left, right = left.squeeze(1), right.squeeze(1)
        if trial_case.gradient_serves(left, right, total is not None):
            return grouped.gradient(total, left, right, chunk.ends)()[0]
        starts = mx.concatenate([mx.zeros(1, mx.int32), chunk.ends[:-1]])
        segments = mx.stack([starts, chunk.ends], axis=1).astype(mx.uint32)
        left, right = left.astype(mx.float32), right.astype(mx.float32)
        sums = mx.segmented_mm(left.T, right, segments)
        return sums if total is None else total + sums

    def _span(self, number: int) -> tuple[int, int]:
        """The first token of a chunk, and the one after its last."""
        return number * self._tokens_per_chunk, min(self.tokens, (number + 1) * self._tokens_per_chunk)


def scores_of(scores: mx.array, chunk: Chunk) -> mx.array:
    """Return the scores of the chunk's rows, [t, m, 1] fp32, from scores [N k]; padding rows have 0."""
    row_scores = scores[chunk.pair].astype(mx.float32)
    if chunk.valid is not None:
        row_scores = row_scores * chunk.valid
    return row_scores.reshape(chunk.experts.size, -1, 1)


def _add_rows(total: mx.array, rows: mx.array, values: mx.array) -> mx.array:
    """Add fp32 values to the given rows of `total`.

    The time of MLX's scatter goes with the number of elements, so two numbers are added as one complex number.
    """
    if total.ndim == 1 or total.shape[-1] % 2:
        return total.at[rows].add(values)
    pairs = total.view(mx.complex64).at[rows].add(values.view(mx.complex64))
    return pairs.view(mx.float32)


def tile_rows(pairs: int, experts: int, matrix_cost: float) -> int:
    """Return m, the rows of a tile, at which padding and tiles cost least together.

    Padding costs about E m rows, and R / m tiles cost `matrix_cost` rows each, so that m is the square root of
    (R / E) * matrix_cost. It is at most 256, and about four times the rows of an expert.
    """
    best = (pairs / experts * matrix_cost) ** 0.5
    step = 8 if best >= 8 else 1
    rows_per_expert = max(1, pairs // min(experts, pairs))
    return max(1, min(round(best / step) * step, -(-rows_per_expert // step) * step * 4, 256))


def single_rows(x: mx.array) -> mx.array:
    """Return x [..., 1, K] with row-major strides; it is copied only if its rows do not follow one another in memory.

    MLX's products on CUDA, and older ones on Metal, use the stride of the axis of size 1 as the distance between
    rows. That stride means nothing: expand_dims makes it 1, a broadcast makes it 0, and arithmetic keeps either.
    """
    return mx.unflatten(x.reshape(-1), 0, x.shape)


def needs_whole_matrices() -> bool:
    """Whether MLX's products take each expert's matrix to follow the one before, as on CUDA.

    The slices of a larger array do not; they are to be copied.
    """
    return backend.device() == "cuda"
