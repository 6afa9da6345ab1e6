"""A batch of fixed shape from examples: shifted by one, padded on the right, weights where a target counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..models.vision.inputs import VisionBatch
from .example import Example
from .vision.media import collate_pictures

FINE_STEP = 32
FINE_LIMIT = 256
COARSE_STEP = 64
COARSE_SHAPES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B rows of T positions.

    inputs int32 [B,T]; targets int32 [B,T], the token that follows each input; weights float32 [B,T], 1 where that
    token counts in the loss and 0 elsewhere; segments int32 [B,T] for packed rows (non-decreasing, one number a
    document, the padding has the last), else None. sources and positions: for each row, each document's source and
    number of positions, in order; blank rows have none. images: what a vision tower reads of the rows.

    Padding stands on the right. In a causal model (attention, recurrence and short convolution alike) a position reads
    only itself and what is left of it, so padding reaches no real position, forward or backward, and needs no mask.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray | None
    sources: tuple[tuple[str, ...], ...]
    positions: tuple[tuple[int, ...], ...]
    images: VisionBatch | None = None


def bucket_widths(max_seq_length: int) -> list[int]:
    """The at most 16 widths to which batches are padded, ascending, the last `max_seq_length`.

    Multiples of 32 to 256, then up to eight multiples of 64 in steps of at least a factor of about 1.4: a compiled
    step is compiled once for each.
    """
    fine = [width for width in range(FINE_STEP, FINE_LIMIT + 1, FINE_STEP) if width < max_seq_length]
    octaves = math.log2(max(max_seq_length / FINE_LIMIT, 1.0))
    count = min(COARSE_SHAPES, math.ceil(2 * octaves))
    coarse = [FINE_LIMIT * 2 ** (octaves * (index + 1) / count) for index in range(count - 1)]
    rounded = {COARSE_STEP * math.ceil(width / COARSE_STEP) for width in coarse}
    return sorted(set(fine) | {width for width in rounded if width < max_seq_length} | {max_seq_length})


def collate(rows: Sequence[Sequence[Example]], width: int, *, packed: bool) -> Batch:
    """The batch of `rows`, each a list of documents laid end to end (none: a blank row of weight 0).

    width: T, at least the positions of every row. Each document keeps its own shift by one, so no target crosses from
    one document into the next. ValueError where a row is longer than `width`, or holds two documents unpacked.
    """
    shape = (len(rows), width)
    inputs, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    segments = np.zeros(shape, np.int32) if packed else None
    for index, row in enumerate(rows):
        if len(row) > 1 and not packed:
            raise ValueError(
                f"row {index} holds {len(row)} documents, which needs segments: collate(..., packed=True)."
            )
        start = 0
        for number, example in enumerate(row):
            end = start + example.positions
            if end > width:
                raise ValueError(f"row {index} needs {end} positions and has {width}.")
            inputs[index, start:end] = example.tokens[:-1]
            targets[index, start:end] = example.tokens[1:]
            weights[index, start:end] = example.targets[1:]
            if segments is not None:
                segments[index, start:end] = number
            start = end
        if segments is not None:
            segments[index, start:] = len(row)
    return Batch(
        inputs,
        targets,
        weights,
        segments,
        sources=tuple(tuple(example.source for example in row) for row in rows),
        positions=tuple(tuple(example.positions for example in row) for row in rows),
        images=None if packed else collate_pictures([row[0] if row else None for row in rows], width),
    )
