"""Several documents to a row, so that little of a batch is padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(positions: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Rows of document numbers whose positions sum to at most `capacity`, by best-fit decreasing.

    Longest first, each into the row with the least room that still takes it; equal cases go to the lower number, so
    the result depends on the arguments alone. It needs at most 11/9 of the fewest rows possible and a few more
    (Johnson et al. 1974, doi:10.1137/0203025). ValueError where a document is longer than `capacity`.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for number in sorted(range(len(positions)), key=lambda number: -positions[number]):
        size = positions[number]
        if size > capacity:
            raise ValueError(f"document {number} has {size} positions, a row {capacity}.")
        place = bisect_left(room, (size, -1))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        insort(room, (left - size, row))
    return [tuple(row) for row in rows]
