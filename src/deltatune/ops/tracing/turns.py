"""The turns of loops over a long row. A plan, which reads sizes and no values, is traced without most of them.

Each turn takes the memory of the others beside the results of those before it. So the first and the last turns are
traced, and for the results of those between them there are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from . import trace


class Turn(NamedTuple):
    """One turn of a loop, from start to stop, or several that are left out of the trace; 0 for a turn as it is."""

    start: int
    stop: int
    left_out: int = 0


def turns(bounds: Sequence[int], first: int = 1, last: int = 1) -> list[Turn]:
    """Return the turns between each two bounds; in the trace of a plan, one for all but the first and the last ones."""
    every = [Turn(*span) for span in pairwise(bounds)]
    middle = every[first:-last]
    if len(middle) < 2 or not trace.current().shortened:
        return every
    return [*every[:first], Turn(middle[0].start, middle[-1].stop, len(middle)), *every[-last:]]


def blank(like: mx.array, length: int, after: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Return an array like another but for the length of an axis, which begins to exist after arrays.

    It has a number of the first of these, since mx.compile merges constants of one shape.
    """
    shape = [*like.shape[:axis], length, *like.shape[axis + 1 :]]
    number = after[0][(slice(1),) * after[0].ndim].reshape([])
    # mx.full() takes the dtype of a number that is an array.
    return mx.depends([mx.full(shape, number.astype(like.dtype))], list(after))[0]
