"""Divides the launches of long rows on Apple GPUs, where macOS ends work that keeps the GPU for about five seconds.

A part computes some rows of queries with their visible keys, or some keys with the queries that may see them. It adds
in the order of the whole launch, so that the bits are the same. A call with T tokens needs T^2 products; the scans of
the gated delta rule, with work that grows with T, are divided in gated_delta/long_scans.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import mlx.core as mx
import numpy as np

from ..kernels.launch import MOST_MULTIPLICATIONS, Execute, Launch
from . import fused
from .fused import TILE, FusedOptions, Operands

# The products of a pair of a query and a key, as multiples of the sizes of a key head and of a value head.
_FORWARD, _QUERIES, _KEYS, _KEYS_ALONE, _VALUES_ALONE = (1, 1), (2, 1), (2, 2), (2, 1), (1, 1)

Part = tuple[int, int]


def forward(options: FusedOptions, x: Operands, machine: str, execute: Execute) -> list[mx.array]:
    """Return y and the sums, as fused.forward writes them."""
    return _by_rows(options, x, _FORWARD, lambda part, _: execute(fused.forward(options, part, machine)))


def queries(
    options: FusedOptions, x: Operands, read: tuple[mx.array, mx.array, mx.array], machine: str, execute: Execute
) -> list[mx.array]:
    """Return dq, as fused.queries writes it; `read` are dy, the sums and delta."""

    def launch(part: Operands, rows: slice) -> list[mx.array]:
        dy, sums, delta = (array[:, :, rows] for array in read)
        return execute(fused.queries(options, part, dy, sums, delta, machine))

    return _by_rows(options, x, _QUERIES, launch)


def keys(
    options: FusedOptions, x: Operands, read: tuple[mx.array, mx.array, mx.array], machine: str, execute: Execute
) -> list[mx.array]:
    """Return dk and dv, as fused.keys writes them; `read` are dy, the sums and delta."""
    if not fused.alone(x):
        return _by_keys(options, x, read, _KEYS, fused.keys, machine, execute)
    dk = _by_keys(options, x, read, _KEYS_ALONE, fused.keys_alone, machine, execute)
    return dk + _by_keys(options, x, read, _VALUES_ALONE, fused.values_alone, machine, execute)


def _by_keys(
    options: FusedOptions,
    x: Operands,
    read: tuple[mx.array, mx.array, mx.array],
    products: tuple[int, int],
    describe: Callable[..., Launch],
    machine: str,
    execute: Execute,
) -> list[mx.array]:
    """Run the kernel on one range of keys after another and concatenate the outputs."""
    parts = _parts(options, x, products, of_keys=True)
    if len(parts) == 1:
        return execute(describe(options, x, *read, machine))
    ahead, of_parts = x.k.shape[2] - x.q.shape[2], []
    for first, last in parts:
        # Queries before the first key of the part do not see it; those after the part see its keys.
        unseen = max(0, first - ahead) if options.causal else 0
        since = first if options.causal else 0
        k, v = (array[:, :, since:] if options.causal else array[:, :, first:last] for array in (x.k, x.v))
        starts, ends = (
            None if bounds is None else mx.maximum(bounds[:, since:] - since, 0) for bounds in (x.starts, x.ends)
        )
        part = Operands(x.q[:, :, unseen:], k, v, None, starts, ends)
        dy, sums, delta = (array[:, :, unseen:] for array in read)
        launch = describe(options, part, dy, sums, delta, machine)
        tiles = -(-(last - first) // TILE)
        of_parts.append([output[:, :, : last - first] for output in execute(_with_tiles(launch, tiles))])
    return [mx.concatenate(list(parts), axis=2) for parts in zip(*of_parts, strict=True)]


def _with_tiles(launch: Launch, tiles: int) -> Launch:
    """Return the launch with its first tiles alone; it leaves the rest of its outputs unwritten."""
    return replace(launch, blocks=(tiles, *launch.blocks[1:]))


def _by_rows(
    options: FusedOptions,
    x: Operands,
    products: tuple[int, int],
    launch: Callable[[Operands, slice], list[mx.array]],
) -> list[mx.array]:
    """Run `launch` on one range of rows after another and concatenate the outputs."""
    parts = _parts(options, x, products)
    if len(parts) == 1:
        return launch(x, slice(None))
    of_parts = []
    for first, last in parts:
        seen = x.k.shape[2] - x.q.shape[2] + last if options.causal else x.k.shape[2]
        k, v = x.k[:, :, :seen], x.v[:, :, :seen]
        starts = None if x.starts is None else x.starts[:, :seen]
        ends = None if x.ends is None else mx.minimum(x.ends[:, :seen], seen)
        rows = slice(first, last)
        of_parts.append(launch(Operands(x.q[:, :, rows], k, v, x.sinks, starts, ends), rows))
    return [mx.concatenate(list(parts), axis=2) for parts in zip(*of_parts, strict=True)]


def _parts(options: FusedOptions, x: Operands, products: tuple[int, int], of_keys: bool = False) -> list[Part]:
    """Return the rows, or the keys, of each part."""
    batch, heads, count, size = x.q.shape
    if options.segmented and not options.causal:
        # A query's segment is the one at its place from the end, which a part would change.
        return [(0, x.k.shape[2] if of_keys else count)]
    pairs = MOST_MULTIPLICATIONS / (batch * heads * (products[0] * size + products[1] * x.v.shape[3]))
    return divided(count, x.k.shape[2], options.causal, options.window_of(x.k.shape[2]), pairs, of_keys)


@lru_cache(maxsize=256)
def divided(queries: int, keys: int, causal: bool, window: int, pairs: float, of_keys: bool = False) -> list[Part]:
    """Divide rows of queries (or keys) into parts of whole tiles with about `pairs` visible pairs or fewer each.

    Args:
        queries, keys: Their numbers; the last query has the position of the last key.
        causal: Whether a query sees no later key.
        window: How many keys a query sees at most; 0 for all.
        pairs: The pairs of a query and a key that a part may have. A single tile may have more.
        of_keys: Whether keys are divided, and not queries.
    """
    length = keys if of_keys else queries
    at, ahead = np.arange(0, length + TILE, TILE).clip(max=length), keys - queries
    if not causal:
        seen = at.astype(float) * (queries if of_keys else keys)
    elif of_keys:
        row = np.arange(length)
        visible_pairs = np.minimum(queries - np.maximum(row - ahead, 0), window or keys)
        seen = np.concatenate([[0.0], np.cumsum(visible_pairs, dtype=float)])[at]
    else:
        visible_pairs = np.minimum(np.arange(length) + ahead + 1, window or keys)
        seen = np.concatenate([[0.0], np.cumsum(visible_pairs, dtype=float)])[at]
    count = max(1, int(np.ceil(seen[-1] / pairs)))
    shares = seen[-1] * np.arange(1, count) / count
    cuts = sorted({0, length, *(int(at[place]) for place in np.searchsorted(seen, shares))})
    return list(pairwise(cuts))
