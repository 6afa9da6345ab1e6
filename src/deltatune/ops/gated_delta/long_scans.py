"""Divides the scans of very long rows on Apple GPUs, where macOS ends work that keeps the GPU for about five seconds.

A part goes through some of a row's chunks. It starts from the state in fp32 with which the part before it ended, so
that the bits are those of one launch. The other kernels have a block for each chunk.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import mlx.core as mx

from ..kernels.launch import MOST_MULTIPLICATIONS, Arrays
from .tiling import Tiling

#: The chunks that a block goes through in one launch. A step has some 2e5 multiplications for heads of 128, which the
#: half of an M1's core that a block keeps busy does in 5 us; with ten times that for barriers and loads, a second.
MOST_STEPS = 16_384

# The arrays that have a row for each token. The others have one for each chunk.
_BY_TOKEN = ("q", "k", "v", "mask", "dy", "y", "dv")
# The states that a scan, or a reverse scan, takes and leaves.
_STATES = {"scan": ("initial", "last"), "reverse": ("d_last", "d_initial")}


def run(tiling: Tiling, phase: str, arrays: Arrays) -> Arrays:
    """Launch either scan, the phase `scan` or `reverse`, on the arrays that its kernel takes, and beta if there is one.

    The outputs by name are those of one launch for the whole row.
    """
    parts = _parts(tiling)
    if len(parts) == 1:
        return tiling.run(phase, arrays)
    taken, left = _STATES[phase]
    names = [name for name in getattr(tiling.kernels, phase).inputs if name in arrays and name != taken]
    state = arrays[taken]
    outputs = []
    for first, last in parts if phase == "scan" else reversed(parts):
        start = first * tiling.chunk
        end = min(last * tiling.chunk, tiling.length)
        of_part = {
            name: arrays[name][:, start:end] if name in _BY_TOKEN else arrays[name][:, :, first:last] for name in names
        }
        part = replace(tiling, length=end - start)
        results = part.run(phase, of_part | {taken: state} | ({"beta": arrays["beta"]} if tiling.erases else {}))
        state = results.pop(left)
        outputs.append(results)
    ordered = outputs if phase == "scan" else outputs[::-1]
    joined = {name: [results[name] for results in ordered] for name in ordered[0]}
    whole = {name: mx.concatenate(rows, axis=1 if name in _BY_TOKEN else 2) for name, rows in joined.items()}
    return whole | {left: state}


def _parts(tiling: Tiling) -> list[tuple[int, int]]:
    """Return the first chunk of each part, and the one after its last: all of them in one part but on Metal."""
    steps = tiling.chunks
    if tiling.machine == "metal":
        x, y, z = tiling.scan_blocks
        chunk = tiling.chunk
        slices = x * y * z * tiling.slice
        # A reverse scan multiplies the state, or its gradient, four times, and triangles of a chunk four times.
        multiplications = slices * chunk * 4 * (tiling.key_size + chunk)
        steps = max(1, min(MOST_STEPS, int(MOST_MULTIPLICATIONS / multiplications)))
    return list(pairwise([*range(0, tiling.chunks, steps), tiling.chunks]))
