"""Calls of a gated-delta layer of a model: on whole rows, with padding, on packed documents, and in pieces."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from deltatune.ops.pieces import States
from deltatune.ops.segments import segments


def whole(layer, x):
    return layer(x)


def masked(layer, x):
    """The first tokens are padding, which the convolution of the others must not read."""
    return layer(x, mx.arange(x.shape[1])[None] >= mx.array([[2], [9]]))


def packed(layer, x):
    owner = mx.array(np.tile(np.repeat([0, 1, 2], [5, 1, x.shape[1] - 6]), (2, 1)))
    with segments(owner):
        return layer(x)


def in_pieces(layer, x):
    """One cache after another, of which the second piece is shorter than the convolution's state."""
    ys, arrays = [], [None, None]
    for start, stop in ((0, 8), (8, 10), (10, x.shape[1])):
        cache = States(arrays)
        ys.append(layer(x[:, start:stop], cache=cache))
        arrays = cache.following
    return mx.concatenate(ys, axis=1)
