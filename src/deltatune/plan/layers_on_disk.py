"""Computes which layers of a step by layers stay on the disk within a memory limit, and the step's peak."""

from __future__ import annotations

from collections.abc import Sequence


def held(peak: int, layers: Sequence[int], streamed: Sequence[int]) -> int:
    """Return the peak of a step that holds two of the `streamed` layers at a time.

    `peak` is that with all weights in memory, and `layers` has the bytes of each layer's frozen weights.
    """
    sizes = sorted(layers[at] for at in streamed)
    return peak - sum(sizes) + sum(sizes[-2:])


def spread(count: int, resident: int) -> tuple[int, ...]:
    """Return which of `count` layers stay on the disk where `resident` stay in memory, evenly between the others."""
    resident_layers = {(2 * at + 1) * count // (2 * resident) for at in range(resident)}
    return tuple(at for at in range(count) if at not in resident_layers)


def left_on_disk(peak: int, layers: Sequence[int], memory: int, *, least: int = 0) -> tuple[int, ...] | None:
    """Return the fewest layers on the disk, `least` or more, with which a step stays within `memory`; None if none."""
    count = len(layers)
    for resident in range(count - least, -1, -1):
        streamed = spread(count, resident) if resident else tuple(range(count))
        if held(peak, layers, streamed) <= memory:
            return streamed
    return None
