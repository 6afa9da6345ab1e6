"""Attention by array operations, a block of queries at a time, with a hand-written backward pass.

One product computes the scores of a block with all keys that causality and the window leave to it. The next block uses
the same memory, and blocks get fewer rows as the rows get longer, so the memory for scores does not depend on the
length. The backward pass computes the weights of a block again, by softmax from the scores: on a CPU, MLX's softmax
takes half the time of its exp. So neither y nor a log-sum-exp is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import mlx.core as mx

from ...machine import backend
from ..functional import refuse_second_derivative, with_gradient, without_vmap
from ..tracing import trace
from ..tracing.turns import blank, turns

_Arrays = tuple[mx.array, ...]
_Function = Callable[..., _Arrays]

NO_VMAP = (
    "attention: mx.vmap cannot map this implementation. Expected every array with its batch axis B first; fold the "
    "mapped axis into B, or set DELTATUNE_ATTENTION=naive, which can be mapped."
)
NO_SECOND_DERIVATIVE = (
    "attention has no second derivative: its backward pass is written by hand. "
    "Force the definition, DELTATUNE_ATTENTION=naive, where one is needed."
)
# The score of a hidden key. It is finite, so that the softmax of a row without visible keys is not NaN.
_LEAST = -1e30
# The number of scores of a block: on a CPU they stay in its caches, and a GPU needs enough rows to be busy.
_SCORES = {"cpu": 1 << 19, "cuda": 1 << 24, "metal": 1 << 23}
# The fewest and the most rows of a block: products of fewer rows are slow, and with more rows, too many of the scores
# are hidden by causality.
_FEWEST, _MOST = 32, 128


@dataclass(frozen=True)
class BlockedOptions:
    """The plain arguments of a call, its optional arrays, and the most scores of a block."""

    scale: float
    causal: bool
    window: int | None
    with_sinks: bool
    segmented: bool
    masked: bool
    scores: int


class QueryBlock(NamedTuple):
    """The queries [first, last), and the keys [low, high) that at least one of them may see."""

    first: int
    last: int
    low: int
    high: int


def attention_blocked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    causal: bool = True,
    segments: mx.array | None = None,
    window: int | None = None,
    sinks: mx.array | None = None,
    mask: mx.array | None = None,
    scores: int | None = None,
) -> mx.array:
    """Compute attention in blocks of queries of at most so many scores, with a hand-derived backward pass.

    Other arguments, the result and errors are those of `attention`. Sources: Rabe and Staats (arXiv 2112.05682), Dao et
    al. (arXiv 2205.14135), and README.md in this folder.
    """
    scores = scores or backend.here(_SCORES)
    options = BlockedOptions(scale, causal, window, sinks is not None, segments is not None, mask is not None, scores)
    sinks32 = mx.zeros((q.shape[1],)) if sinks is None else sinks.astype(mx.float32)
    extra = [x for x in (segments, mask) if x is not None]
    arrays = without_vmap(NO_VMAP)(q, k, v, sinks32, *map(mx.stop_gradient, extra))
    y, _ = _forward_by(options)(*arrays)
    return y


@lru_cache(maxsize=256)
def _forward_by(options: BlockedOptions) -> _Function:
    """Return f(q, k, v, sinks, segments?, mask?) -> (y, the factor of the weights of each row)."""
    refuse = refuse_second_derivative(NO_SECOND_DERIVATIVE)
    backward = with_gradient(partial(_backward, options), refuse)

    def vjp(primals: _Arrays, cotangents: _Arrays, outputs: _Arrays) -> _Arrays:
        gradients = backward(*primals, cotangents[0], outputs[1])
        return *gradients, *map(mx.zeros_like, primals[4:])

    return with_gradient(partial(_forward, options), vjp)


def _forward(
    options: BlockedOptions, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array, *extra: mx.array
) -> tuple[mx.array, mx.array]:
    ys: list[mx.array] = []
    shares: list[mx.array] = []
    for part in _parts(options, [q], k, v, sinks, extra):
        if isinstance(part, int):
            ys.append(blank(ys[-1], part, ys[-1:]))
            shares += [blank(shares[-1], part, ys[-1:])] if shares[-1].size else []
            continue
        y = mx.zeros((*part.queries[0].shape[:4], v.shape[3]), q.dtype)
        share = mx.zeros(y.shape[:4] if part.shared else (0,), mx.float32)
        for block in part.blocks():
            rows = part.rows(0, block, (y,))
            weights, block_shares = part.weights(rows, block)
            result = part.unfolded(part.folded(weights) @ part.v[..., block.low : block.high, :], block)
            if block_shares is not None:
                share[..., block.first : block.last] = block_shares
                result = result * block_shares[..., None]
            y[..., block.first : block.last, :] = result.astype(q.dtype)
        ys.append(y)
        shares.append(share)
    return _joined(ys, (*q.shape[:3], v.shape[3])), _joined(shares, q.shape[:3]) if shares[0].size else shares[0]


def _backward(
    options: BlockedOptions, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array, *more: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Return the gradients of q, k, v and the sinks.

    With the weights w = share * softmax, the gradient of a score is w (dy . v - delta), where delta is the sum of
    w dy . v over the row. It equals dy . y, but y is rounded to its dtype, so that the two terms would not cancel where
    one key has all the weight.
    """
    *extra, dy, share = more
    along = [q, dy] + ([share[..., None]] if share.size else [])
    results: tuple[list[mx.array], ...] = ([], [], [], [])
    for part in _parts(options, along, k, v, sinks, extra):
        if isinstance(part, int):
            after = [of_parts[-1] for of_parts in results]
            for of_parts in results:
                of_parts.append(blank(of_parts[-1], part * of_parts[-1].shape[0], after))
            continue
        dq, dk, dv = mx.zeros(part.queries[0].shape, q.dtype), mx.zeros_like(part.k), mx.zeros_like(part.v)
        dsinks = mx.zeros(part.sinks.shape)
        for block in part.blocks():
            keys, before = slice(block.low, block.high), (dq, dk, dv)
            rows, dy_rows, *share_rows = (part.rows(i, block, before) for i in range(len(along)))
            weights, _ = part.weights(rows, block)
            dy_rows = part.folded(dy_rows * share_rows[0] if share_rows else dy_rows)
            weights, dweights = part.folded(weights), dy_rows @ part.v[..., keys, :].swapaxes(-1, -2)
            delta = (weights * dweights).sum(axis=-1, keepdims=True)
            if share_rows:
                unfolded = part.unfolded(delta, block)
                dsinks = dsinks - (unfolded * (1.0 - share_rows[0])).sum(axis=(0, 3, 4))
                delta = part.folded(unfolded * share_rows[0])
            dscores = weights * (dweights - delta)
            dq[..., block.first : block.last, :] = part.unfolded(dscores @ part.k[..., keys, :], block) * options.scale
            rows = part.folded(rows) * options.scale
            dk[..., keys, :] = mx.addmm(dk[..., keys, :], dscores.swapaxes(-1, -2), rows)
            dv[..., keys, :] = mx.addmm(dv[..., keys, :], weights.swapaxes(-1, -2), dy_rows)
        for of_parts, result in zip(results, (dq, dk.astype(k.dtype), dv.astype(v.dtype), dsinks), strict=True):
            of_parts.append(result)
    dq, dk, dv = (_joined(of_parts, x.shape) for of_parts, x in zip(results, (q, k, v), strict=False))
    return dq, dk, dv, mx.concatenate([x.reshape(-1) for x in results[3]]).reshape(-1, q.shape[1]).sum(axis=0)


def _joined(parts: Sequence[mx.array], shape: Sequence[int]) -> mx.array:
    """Return the results of the parts, which hold the rows of the whole in their order, as one array."""
    whole = parts[0] if len(parts) == 1 else mx.concatenate([x.reshape(-1, *x.shape[2:]) for x in parts])
    return whole.reshape(shape)


@dataclass(frozen=True)
class _Part:
    """The arrays of the key heads that are computed together: some heads of one batch row on a CPU, all on a GPU.

    `queries` have a row per query, [b, h, G, Tq, any], where G query heads read one key head; k and v are [b, h, 1, Tk,
    any] in fp32, sinks [h, G], segments [b, 1, 1, Tk], and mask [b, h, G, Tq, Tk], of which any axis may be 1.
    """

    options: BlockedOptions
    queries: list[mx.array]
    k: mx.array
    v: mx.array
    sinks: mx.array
    segments: mx.array | None
    mask: mx.array | None

    @property
    def shared(self) -> bool:
        """Whether the weights of a row may sum to less than 1, because it has a sink or may see no key."""
        return self.options.with_sinks or self.mask is not None or self.k.shape[3] < self.queries[0].shape[3]

    def blocks(self) -> list[QueryBlock]:
        """Return the blocks that see a key, in order; in the trace of a plan, the first and the last two alone."""
        (*heads, queries, _), keys, options = self.queries[0].shape, self.k.shape[3], self.options
        ahead, first = keys - queries, 0
        blocks: list[QueryBlock] = []
        while first < queries:
            rows = options.scores // (heads[0] * heads[1] * heads[2] * self._seen(first + ahead, keys))
            last = min(queries, first + max(_FEWEST, min(_MOST, rows // _FEWEST * _FEWEST)))
            low = 0 if options.window is None else max(0, first + ahead - options.window + 1)
            high = min(keys, last + ahead) if options.causal else keys
            if high > low:
                blocks.append(QueryBlock(first, last, low, high))
            first = last
        # MLX's queue holds arrays of more than one block.
        return [blocks[0], *blocks[-2:]] if len(blocks) > 3 and trace.current().shortened else blocks

    def _seen(self, position: int, keys: int) -> int:
        """Return about how many keys the query at `position` sees."""
        seen = min(keys, position + _FEWEST) if self.options.causal else keys
        return max(1, seen if self.options.window is None else min(seen, self.options.window + _FEWEST))

    def rows(self, which: int, block: QueryBlock, before: Sequence[mx.array]) -> mx.array:
        """Return the block's rows of queries[which] in fp32; they wait until the arrays in `before` are computed."""
        rows = self.queries[which][..., block.first : block.last, :]
        return mx.depends([rows], list(before))[0].astype(mx.float32)

    def folded(self, rows: mx.array) -> mx.array:
        """Reshape [b, h, G, R, n] to [b, h, 1, G R, n], so that one product serves all heads of a key head."""
        return rows.reshape(*rows.shape[:2], 1, -1, rows.shape[4])

    def unfolded(self, rows: mx.array, block: QueryBlock) -> mx.array:
        return rows.reshape(*rows.shape[:2], -1, block.last - block.first, rows.shape[4])

    def weights(self, rows: mx.array, block: QueryBlock) -> tuple[mx.array, mx.array | None]:
        """Return the softmax of the scores [b, h, G, R, n] and, if `shared`, the factor of each row [b, h, G, R].

        The factor is the keys' share beside the sink, or 0 for a row that sees no key.
        """
        folded = self.folded(rows * self.options.scale)
        scores = self.unfolded(folded @ self.k[..., block.low : block.high, :].swapaxes(-1, -2), block)
        visible, start = self._visible(block)
        if self.mask is not None:
            mask = self.mask[..., block.low : block.high] if self.mask.shape[4] > 1 else self.mask
            mask = mask[..., block.first : block.last, :] if mask.shape[3] > 1 else mask
            if mask.dtype != mx.bool_:
                scores = scores + mask.astype(mx.float32)
                mask = mask > _LEAST
            scores = mx.where(mask, scores, _LEAST)
        if visible is not None:
            scores[..., start:] = mx.where(visible, scores[..., start:], _LEAST)
        share = None
        if self.options.with_sinks:
            share = mx.sigmoid(mx.logsumexp(scores, axis=-1) - self.sinks[..., None])
        elif self.shared:
            share = (scores.max(axis=-1) > _LEAST).astype(mx.float32)
        return mx.softmax(scores, axis=-1), share

    def _visible(self, block: QueryBlock) -> tuple[mx.array | None, int]:
        """Return which of a block's keys from index `start` on its rows see, or None for all, and `start`.

        All keys before it are visible.
        """
        ahead, conditions = self.k.shape[3] - self.queries[0].shape[3], []
        windowed = self.options.window is not None and block.low < block.last + ahead - self.options.window
        # Causality alone can only hide keys at the positions of the block's own queries.
        start = 0 if windowed or self.segments is not None else max(0, block.first + ahead - block.low)
        position = mx.arange(block.first + ahead, block.last + ahead)[:, None]
        keys = mx.arange(block.low + start, block.high)[None]
        if self.options.causal and block.high > block.first + ahead + 1:
            conditions.append(keys <= position)
        if self.options.window is not None and windowed:
            conditions.append(keys > position - self.options.window)
        if self.segments is not None:
            of_rows = self.segments[..., block.first + ahead : block.last + ahead]
            of_keys = self.segments[..., block.low + start : block.high]
            conditions.append(of_rows[..., :, None] == of_keys[..., None, :])
        if not conditions:
            return None, start
        visible = conditions[0]
        for other in conditions[1:]:
            visible = visible & other
        return visible, start


def _parts(
    options: BlockedOptions,
    queries: Sequence[mx.array],
    k: mx.array,
    v: mx.array,
    sinks: mx.array,
    extra: Sequence[mx.array],
) -> Iterator[_Part | int]:
    """Yield the parts of a call, or the number of those that are left out of the trace of a plan (turns.py).

    `queries` are arrays [B, Hq, Tq, any], `extra` the segments and the mask, if any.
    """
    batch, heads = k.shape[:2]
    rows = [x.reshape(batch, heads, -1, *x.shape[2:]) for x in queries]
    sinks = sinks.reshape(heads, -1)
    arrays = list(extra)
    segments = arrays.pop(0)[:, None, None] if options.segmented else None
    mask = arrays.pop(0) if options.masked else None
    if mask is not None:
        shape = (heads, -1) if mask.shape[1] > 1 else (1, 1)
        mask = mask.reshape(mask.shape[0], *shape, *mask.shape[2:])

    def part(b: slice, h: slice) -> _Part:
        def of(x: mx.array) -> mx.array:
            return x[b if x.shape[0] > 1 else slice(1), h if x.shape[1] > 1 else slice(1)]

        keys, values = (of(x).astype(mx.float32)[:, :, None] for x in (k, v))
        own_segments, own_mask = (None if x is None else of(x) for x in (segments, mask))
        return _Part(options, [of(x) for x in rows], keys, values, sinks[h], own_segments, own_mask)

    if backend.device() != "cpu":
        yield part(slice(None), slice(None))
        return
    # Each operation takes some microseconds, however small it is. So as many heads are computed together as is possible
    # with enough rows in a block.
    seen = k.shape[2] if options.window is None else min(k.shape[2], options.window + _MOST)
    most = options.scores // (rows[0].shape[2] * min(_MOST, rows[0].shape[3]) * seen)
    together = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, most))
    parts = [(slice(b, b + 1), slice(h, h + together)) for b in range(batch) for h in range(0, heads, together)]
    for turn in turns(range(len(parts) + 1)):
        yield turn.left_out or part(*parts[turn.start])
