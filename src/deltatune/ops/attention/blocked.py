"""Attention by array operations, a block of queries at a time, with a backward pass of its own.

A block meets all keys that causality and the window leave it, in one product, and the next block uses its memory
again: blocks shrink as rows of scores grow, so the memory does not depend on the length. The backward pass computes a
block's weights anew. MLX's softmax costs half of what its exp does on a CPU, so the weights come from the scores by
softmax there too, and neither y nor a log-sum-exp is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, cast

import mlx.core as mx

from ...machine import backend
from ..functional import without_vmap

_Arrays = tuple[mx.array, ...]
_Function = Callable[..., _Arrays]

NO_VMAP = (
    "attention: mx.vmap cannot map this implementation. Expected every array with its batch axis B first; fold the "
    "mapped axis into B, or set DELTATUNE_ATTENTION=naive, which can be mapped."
)
# Stands for minus infinity among scores: a row of nothing else has a softmax, and no NaN.
_LEAST = -1e30
# Scores of a block. On a CPU they stay in its caches; a GPU wants enough rows to be busy.
_SCORES = {"cpu": 1 << 19, "cuda": 1 << 24, "metal": 1 << 23}
# Fewer rows than this make poor products, more than this compute too much that causality hides.
_FEWEST, _MOST = 32, 128


@dataclass(frozen=True)
class BlockedOptions:
    """What of a call is no array: the scale, which keys causality and the window leave, and which arrays come."""

    scale: float
    causal: bool
    window: int | None
    sunk: bool
    segmented: bool
    masked: bool
    scores: int


class QueryBlock(NamedTuple):
    """Queries `first` to `last`, and the keys `low` to `high` that at least one of them may see."""

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
    """Blocks of queries with a hand-derived backward pass; arguments and result as `attention`.

    scores: how many scores a block may hold; by default what suits MLX's default device.

    Raises NotImplementedError when a second derivative is taken; ValueError when mx.vmap maps it.

    Source: Rabe and Staats (arXiv 2112.05682); Dao et al. (arXiv 2205.14135); README.md.
    """
    scores = scores or _SCORES[backend.device()]
    kind = BlockedOptions(scale, causal, window, sinks is not None, segments is not None, mask is not None, scores)
    sinks32 = mx.zeros((q.shape[1],)) if sinks is None else sinks.astype(mx.float32)
    extra = [x for x in (segments, mask) if x is not None]
    arrays = without_vmap(NO_VMAP)(q, k, v, sinks32, *map(mx.stop_gradient, extra))
    y, _ = _forward_by(kind)(*arrays)
    return y


@lru_cache(maxsize=256)
def _forward_by(kind: BlockedOptions) -> _Function:
    """f(q, k, v, sinks, segments?, mask?) -> (y, what the weights of each row are multiplied by)."""
    forward = mx.custom_function(lambda *arrays: _forward(kind, *arrays))
    backward = mx.custom_function(lambda *arrays: _backward(kind, *arrays))
    call_forward, call_backward = cast(_Function, forward), cast(_Function, backward)

    def vjp(primals: _Arrays, cotangents: _Arrays, outputs: _Arrays) -> _Arrays:
        gradients = call_backward(*primals, cotangents[0], outputs[1])
        return *gradients, *map(mx.zeros_like, primals[4:])

    forward.vjp(vjp)
    backward.vjp(refuse_second_derivative)
    return call_forward


def refuse_second_derivative(*_: object) -> None:
    """The rule of mx.vjp for a backward pass that was written by hand."""
    raise NotImplementedError(
        "attention has no second derivative: its backward pass is written by hand. "
        "Force the definition, DELTATUNE_ATTENTION=naive, where one is needed."
    )


def _forward(
    kind: BlockedOptions, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array, *extra: mx.array
) -> tuple[mx.array, mx.array]:
    ys, shares = [], []
    for part in _parts(kind, [q], k, v, sinks, extra):
        y = mx.zeros((*part.queries[0].shape[:4], v.shape[3]), q.dtype)
        share = mx.zeros(y.shape[:4] if part.shared else (0,), mx.float32)
        for block in part.blocks():
            rows = part.rows(0, block, (y,))
            weights, own = part.weights(rows, block)
            result = part.unfolded(part.folded(weights) @ part.v[..., block.low : block.high, :], block)
            if own is not None:
                share[..., block.first : block.last] = own
                result = result * own[..., None]
            y[..., block.first : block.last, :] = result.astype(q.dtype)
        ys.append(y)
        shares.append(share)
    return _joined(ys, (*q.shape[:3], v.shape[3])), _joined(shares, q.shape[:3]) if part.shared else shares[0]


def _backward(
    kind: BlockedOptions, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array, *more: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Gradients of q, k, v and the sinks. With weights w = share * softmax, dscore = w (dy . v - sum of w dy . v).

    That sum is dy . y, but y is rounded to its dtype: what cancels where one key takes all would not.
    """
    *extra, dy, share = more
    along = [q, dy] + ([share[..., None]] if share.size else [])
    results: tuple[list[mx.array], ...] = ([], [], [], [])
    for part in _parts(kind, along, k, v, sinks, extra):
        dq, dk, dv = mx.zeros(part.queries[0].shape, q.dtype), mx.zeros_like(part.k), mx.zeros_like(part.v)
        dsinks = mx.zeros(part.sinks.shape)
        for block in part.blocks():
            keys, before = slice(block.low, block.high), (dq, dk, dv)
            rows, dy_rows, *own = (part.rows(i, block, before) for i in range(len(along)))
            weights, _ = part.weights(rows, block)
            dy_rows = part.folded(dy_rows * own[0] if own else dy_rows)
            weights, dweights = part.folded(weights), dy_rows @ part.v[..., keys, :].swapaxes(-1, -2)
            delta = (weights * dweights).sum(axis=-1, keepdims=True)
            if own:
                unfolded = part.unfolded(delta, block)
                dsinks = dsinks - (unfolded * (1.0 - own[0])).sum(axis=(0, 3, 4))
                delta = part.folded(unfolded * own[0])
            dscores = weights * (dweights - delta)
            dq[..., block.first : block.last, :] = part.unfolded(dscores @ part.k[..., keys, :], block) * kind.scale
            rows = part.folded(rows) * kind.scale
            dk[..., keys, :] = mx.addmm(dk[..., keys, :], dscores.swapaxes(-1, -2), rows)
            dv[..., keys, :] = mx.addmm(dv[..., keys, :], weights.swapaxes(-1, -2), dy_rows)
        for found, result in zip(results, (dq, dk.astype(k.dtype), dv.astype(v.dtype), dsinks), strict=True):
            found.append(result)
    dq, dk, dv = (_joined(found, x.shape) for found, x in zip(results, (q, k, v), strict=False))
    return dq, dk, dv, mx.concatenate([x.reshape(-1) for x in results[3]]).reshape(-1, q.shape[1]).sum(axis=0)


def _joined(parts: Sequence[mx.array], shape: Sequence[int]) -> mx.array:
    """What the parts found, which are the rows of the whole in their order."""
    whole = parts[0] if len(parts) == 1 else mx.concatenate([x.reshape(-1, *x.shape[2:]) for x in parts])
    return whole.reshape(shape)


@dataclass(frozen=True)
class _Part:
    """The arrays of some key heads of one row of the batch on a CPU, of all of them on a GPU.

    `queries`: arrays along the queries, [b, h, G, Tq, any]; k, v [b, h, 1, Tk, any] in fp32, where G query heads read
    one key head; sinks [h, G]; segments [b, 1, 1, Tk]; mask, of which any axis may be 1, [b, h, G, Tq, Tk].
    """

    kind: BlockedOptions
    queries: list[mx.array]
    k: mx.array
    v: mx.array
    sinks: mx.array
    segments: mx.array | None
    mask: mx.array | None

    @property
    def shared(self) -> bool:
        """Whether a row's weights may sum to less than 1: it has a sink, or may see nothing."""
        return self.kind.sunk or self.mask is not None or self.k.shape[3] < self.queries[0].shape[3]

    def blocks(self) -> Iterator[QueryBlock]:
        """The blocks that see a key, first to last."""
        (*heads, queries, _), keys, kind = self.queries[0].shape, self.k.shape[3], self.kind
        ahead, first = keys - queries, 0
        while first < queries:
            rows = kind.scores // (heads[0] * heads[1] * heads[2] * self._seen(first + ahead, keys))
            last = min(queries, first + max(_FEWEST, min(_MOST, rows // _FEWEST * _FEWEST)))
            low = 0 if kind.window is None else max(0, first + ahead - kind.window + 1)
            high = min(keys, last + ahead) if kind.causal else keys
            if high > low:
                yield QueryBlock(first, last, low, high)
            first = last

    def _seen(self, position: int, keys: int) -> int:
        """About as many keys as the query at `position` sees."""
        seen = min(keys, position + _FEWEST) if self.kind.causal else keys
        return max(1, seen if self.kind.window is None else min(seen, self.kind.window + _FEWEST))

    def rows(self, which: int, block: QueryBlock, before: Sequence[mx.array]) -> mx.array:
        """The block's rows of an array along the queries, in fp32, no sooner than `before` is there."""
        rows = self.queries[which][..., block.first : block.last, :]
        return mx.depends([rows], list(before))[0].astype(mx.float32)

    def folded(self, rows: mx.array) -> mx.array:
        """[b, h, G, R, n] as [b, h, 1, G R, n], so that one product serves the heads that share a key head."""
        return rows.reshape(*rows.shape[:2], 1, -1, rows.shape[4])

    def unfolded(self, rows: mx.array, block: QueryBlock) -> mx.array:
        """What `folded` undoes."""
        return rows.reshape(*rows.shape[:2], -1, block.last - block.first, rows.shape[4])

    def weights(self, rows: mx.array, block: QueryBlock) -> tuple[mx.array, mx.array | None]:
        """The softmax of the block's scores [b, h, G, R, n]; and, if `shared`, what its rows are to be multiplied by
        [b, h, G, R]: what the sink leaves them, 0 where a row sees nothing."""
        folded = self.folded(rows * self.kind.scale)
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
        if self.kind.sunk:
            share = mx.sigmoid(mx.logsumexp(scores, axis=-1) - self.sinks[..., None])
        elif self.shared:
            share = (scores.max(axis=-1) > _LEAST).astype(mx.float32)
        return mx.softmax(scores, axis=-1), share

    def _visible(self, block: QueryBlock) -> tuple[mx.array | None, int]:
        """Which keys of a block, from number `start` of them on, causality, the window and the segments leave to it.

        Returns None where that is all of them; and `start`, before which all are seen.
        """
        ahead, found = self.k.shape[3] - self.queries[0].shape[3], []
        windowed = self.kind.window is not None and block.low < block.last + ahead - self.kind.window
        # Under causality alone only the keys that stand beside the block's own queries are in question.
        start = 0 if windowed or self.segments is not None else max(0, block.first + ahead - block.low)
        position = mx.arange(block.first + ahead, block.last + ahead)[:, None]
        keys = mx.arange(block.low + start, block.high)[None]
        if self.kind.causal and block.high > block.first + ahead + 1:
            found.append(keys <= position)
        if self.kind.window is not None and windowed:
            found.append(keys > position - self.kind.window)
        if self.segments is not None:
            of_rows = self.segments[..., block.first + ahead : block.last + ahead]
            of_keys = self.segments[..., block.low + start : block.high]
            found.append(of_rows[..., :, None] == of_keys[..., None, :])
        if not found:
            return None, start
        visible = found[0]
        for other in found[1:]:
            visible = visible & other
        return visible, start


def _parts(
    kind: BlockedOptions,
    queries: Sequence[mx.array],
    k: mx.array,
    v: mx.array,
    sinks: mx.array,
    extra: Sequence[mx.array],
) -> Iterator[_Part]:
    batch, heads = k.shape[:2]
    rows = [x.reshape(batch, heads, -1, *x.shape[2:]) for x in queries]
    sinks = sinks.reshape(heads, -1)
    rest = list(extra)
    segments = rest.pop(0)[:, None, None] if kind.segmented else None
    mask = rest.pop(0) if kind.masked else None
    if mask is not None:
        shape = (heads, -1) if mask.shape[1] > 1 else (1, 1)
        mask = mask.reshape(mask.shape[0], *shape, *mask.shape[2:])

    def part(b: slice, h: slice) -> _Part:
        def of(x: mx.array) -> mx.array:
            return x[b if x.shape[0] > 1 else slice(1), h if x.shape[1] > 1 else slice(1)]

        keys, values = (of(x).astype(mx.float32)[:, :, None] for x in (k, v))
        own_segments, own_mask = (None if x is None else of(x) for x in (segments, mask))
        return _Part(kind, [of(x) for x in rows], keys, values, sinks[h], own_segments, own_mask)

    if backend.device() != "cpu":
        yield part(slice(None), slice(None))
        return
    # As many heads at once as leave a block its rows: each operation costs some microseconds, however small it is.
    seen = k.shape[2] if kind.window is None else min(k.shape[2], kind.window + _MOST)
    most = kind.scores // (rows[0].shape[2] * min(_MOST, rows[0].shape[3]) * seen)
    together = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, most))
    for b in range(batch):
        for h in range(0, heads, together):
            yield part(slice(b, b + 1), slice(h, h + together))
