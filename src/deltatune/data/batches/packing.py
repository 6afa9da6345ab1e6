"""Packs several documents into a row, so that little of a batch is padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from ...options.config import TrainConfig


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
