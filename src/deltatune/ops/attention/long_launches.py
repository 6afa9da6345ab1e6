"""Divides the launches of long rows on Apple GPUs, where macOS ends work that keeps the GPU for about five seconds.

A part computes some rows of queries with their visible keys, or some keys with the queries that may see them. It adds
in the order of the whole launch, so that the bits are the same. A call with T tokens needs T^2 products; the scans of
the gated delta rule, with work that grows with T, are divided in gated_delta/long_scans.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import mlx.core as mx
import numpy as np

from ..kernels.launch import MOST_MULTIPLICATIONS, Arrays, Kernel
from . import fused
from .fused import FORWARD, KEYS, KEYS_ALONE, QUERIES, TILE, VALUES_ALONE, FusedOptions

# The products of a pair of a query and a key, as multiples of the sizes of a key head and of a value head.
_PRODUCTS = {FORWARD: (1, 1), QUERIES: (2, 1), KEYS: (2, 2), KEYS_ALONE: (2, 1), VALUES_ALONE: (1, 1)}
_OF_QUERIES = ("q", "dy", "sums", "delta")

Part = tuple[int, int]


def run(kernel: Kernel, options: FusedOptions, x: Arrays, machine: str) -> list[mx.array]:
    """Run a kernel on one range of its rows after another, and return its outputs, those of fused.launch."""
    of_keys = kernel not in (FORWARD, QUERIES)
    parts = _parts(kernel, options, x, of_keys) if machine == "metal" else []
    if len(parts) <= 1:
        return fused.launch(kernel, options, x, machine)()
    of_part = _of_keys if of_keys else _of_rows
    outputs = []
    for first, last in parts:
        launch = fused.launch(kernel, options, of_part(options, x, first, last), machine)
        # A launch for some keys leaves the rest of its outputs unwritten.
        launch = replace(launch, blocks=(-(-(last - first) // TILE), *launch.blocks[1:]))
        outputs.append([output[:, :, : last - first] if of_keys else output for output in launch()])
    return [mx.concatenate(list(arrays), axis=2) for arrays in zip(*outputs, strict=True)]


def _of_keys(options: FusedOptions, x: Arrays, first: int, last: int) -> Arrays:
    """Return the arrays of a launch for the keys from `first` to before `last`, with the queries that may see them."""
    ahead = x["k"].shape[2] - x["q"].shape[2]
    # Queries before the first key of the part do not see it; those after the part see its keys.
    unseen = max(0, first - ahead) if options.causal else 0
    since = first if options.causal else 0
    part = {name: array[:, :, unseen:] if name in _OF_QUERIES else array for name, array in x.items()}
    part |= {name: x[name][:, :, since:] if options.causal else x[name][:, :, first:last] for name in ("k", "v")}
    bounds = [name for name in ("starts", "ends") if name in x]
    return part | {name: mx.maximum(x[name][:, since:] - since, 0) for name in bounds}


def _of_rows(options: FusedOptions, x: Arrays, first: int, last: int) -> Arrays:
    """Return the arrays of a launch for the queries from `first` to before `last`, with the keys that they may see."""
    seen = x["k"].shape[2] - x["q"].shape[2] + last if options.causal else x["k"].shape[2]
    part = {name: array[:, :, first:last] if name in _OF_QUERIES else array for name, array in x.items()}
    part |= {name: x[name][:, :, :seen] for name in ("k", "v")}
    if "starts" in x:
        part |= {"starts": x["starts"][:, :seen], "ends": mx.minimum(x["ends"][:, :seen], seen)}
    return part


def _parts(kernel: Kernel, options: FusedOptions, x: Arrays, of_keys: bool) -> list[Part]:
    batch, heads, count, size = x["q"].shape
    keys, products = x["k"].shape[2], _PRODUCTS[kernel]
    if options.segmented and not options.causal:
        # A query's segment is the one at its place from the end, which a part would change.
        return [(0, keys if of_keys else count)]
    pairs = MOST_MULTIPLICATIONS / (batch * heads * (products[0] * size + products[1] * x["v"].shape[3]))
    return divided(count, keys, options.causal, options.window_of(keys), pairs, of_keys)


@lru_cache(maxsize=256)
def divided(queries: int, keys: int, causal: bool, window: int, pairs: float, of_keys: bool = False) -> list[Part]:
    """Divide rows of queries (or keys) into parts of whole tiles with about `pairs` visible pairs or fewer each.

    The last query has the position of the last key; a window of 0 hides none. A single tile may have more pairs.
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
