"""Builds batches of fixed shape from examples.

Targets are the inputs shifted by one, rows are padded on the right, and weights mark the targets that count.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ...models.vision.inputs import VisionBatch, VisionSpec
from ...options.config import TrainConfig
from ..example import Example
from ..preferences.preference import PreferenceBatch
from ..vision.media import collate_pictures

# Widths up to FINE_LIMIT are multiples of FINE_STEP; above it, at most COARSE_SHAPES multiples of COARSE_STEP.
FINE_STEP = 32
FINE_LIMIT = 256
COARSE_STEP = 64
COARSE_SHAPES = 8


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """The sampled answers of a batch of B rows of T positions. Numbers of other positions are 0.

    `figures`, float32 [2, F], are sums, and of how many numbers each is the sum. For each target, float32 [B, T], there
    are the advantage of its answer and its log-probability: when it was `sampled`, `old` in training before the first
    update (None for the present forward pass), and of the `reference` model. `total`, float32 [], divides the batch's
    sum of losses; it counts dropped answers, too. Distillation reads the figures and the hidden states of the teacher,
    [B, T, E], alone; None where the step computes them.
    """

    figures: np.ndarray | None = None
    advantages: np.ndarray | None = None
    sampled: np.ndarray | None = None
    total: np.ndarray | None = None
    old: np.ndarray | None = None
    reference: np.ndarray | None = None
    teacher: mx.array | None = None

    def arrays(self) -> dict[str, np.ndarray | mx.array]:
        """Return the arrays of a step, by name."""
        named = {name: getattr(self, name) for name in self.__slots__}
        return {name: array for name, array in named.items() if array is not None}


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch of B rows with T positions each.

    Rows are padded on the right. In a causal model (attention, recurrence and short convolution alike) a position reads
    only itself and the positions to its left, so padding reaches no real position, forward or backward, and needs no
    mask.

    Args:
        inputs: int32 [B, T], the tokens that the model reads.
        targets: int32 [B, T], the token that follows each input.
        weights: float32 [B, T], 1 where the target counts in the loss and 0 elsewhere.
        segments: int32 [B, T] for packed rows, else None; non-decreasing along a row, with one number for each document
            and one more for the padding.
        sources: For each row, the source of each of its documents; a blank row has none.
        positions: For each row, the number of positions of each of its documents.
        images: The inputs of the vision tower, or None for a model without one.
        preferences: Which documents are the answers of one preference, or None where each is learnt by itself.
        rollouts: The numbers beside sampled answers; None where a run samples none.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray | None
    sources: tuple[tuple[str, ...], ...]
    positions: tuple[tuple[int, ...], ...]
    images: VisionBatch | None = None
    preferences: PreferenceBatch | None = None
    rollouts: RolloutBatch | None = None


def bucket_widths(max_seq_length: int) -> list[int]:
    """Return the widths to which batches are padded: at most 16, ascending, the last equal to `max_seq_length`.

    They are multiples of 32 up to 256, then up to eight multiples of 64 that grow by a factor of about 1.4 or more.
    There are few of them because a training step is compiled once for each.
    """
    fine = [width for width in range(FINE_STEP, FINE_LIMIT + 1, FINE_STEP) if width < max_seq_length]
    octaves = math.log2(max(max_seq_length / FINE_LIMIT, 1.0))
    count = min(COARSE_SHAPES, math.ceil(2 * octaves))
    coarse = [FINE_LIMIT * 2 ** (octaves * (index + 1) / count) for index in range(count - 1)]
    rounded = {COARSE_STEP * math.ceil(width / COARSE_STEP) for width in coarse}
    return sorted(set(fine) | {width for width in rounded if width < max_seq_length} | {max_seq_length})


def collate(rows: Sequence[Sequence[Example]], width: int, *, packed: bool, vision: VisionSpec | None = None) -> Batch:
    """Build a batch from rows of documents.

    Each document is shifted by one on its own, so no target crosses from one document into the next.

    Args:
        rows: For each row, its documents in order; an empty row becomes a blank row of weight 0.
        width: The number of positions T of every row.
        packed: Whether a row may hold several documents, which are then told apart by `segments`.
        vision: The numbers of the model's vision tower; None for a model without one.

    Raises:
        ValueError: A row needs more than `width` positions, or holds several documents and `packed` is False.
    """
    shape = (len(rows), width)
    inputs, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    segments = np.zeros(shape, np.int32) if packed else None
    images = None
    if vision is not None and not packed:
        images = collate_pictures([row[0] if row else None for row in rows], width, vision)
    for index, row in enumerate(rows):
        if len(row) > 1 and not packed:
            raise ValueError(
                f"row {index} holds {len(row)} documents, which needs segments: collate(..., packed=True)."
            )
        start = 0
        for number, example in enumerate(row):
            # A prompt has fewer tokens than positions: its answer is not sampled yet.
            end = start + len(example.tokens) - 1
            if end > width:
                raise ValueError(f"row {index} needs {end:,} positions and has {width:,}.")
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
        images=images,
    )


def row_capacity(config: TrainConfig) -> int:
    """Return the positions of the longest row: a packed row has room for both documents of any preference."""
    return config.max_seq_length * (2 if config.pack and config.has_preferences else 1)


def pack(positions: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Distribute documents over rows by best-fit decreasing, and return the document numbers of each row.

    The longest document comes first, and each goes into the fullest row that still has room for it. Equal cases go to
    the lower number, so the result depends on the arguments alone. The number of rows is at most 11/9 of the smallest
    possible number, plus a small constant (Johnson et al. 1974, doi:10.1137/0203025). A document of more positions than
    `capacity` is a ValueError.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for number in sorted(range(len(positions)), key=lambda number: -positions[number]):
        size = positions[number]
        if size > capacity:
            raise ValueError(f"document {number} has {size:,} positions, and a row holds {capacity:,}.")
        place = bisect_left(room, (size, -1))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left = capacity
            row = len(rows)
            rows.append([])
        rows[row].append(number)
        insort(room, (left - size, row))
    return [tuple(row) for row in rows]
