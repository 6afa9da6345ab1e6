"""Divides the scans of very long rows on Apple GPUs, where macOS ends work that keeps the GPU for about five seconds.

A part goes through some of a row's chunks. It starts from the state in fp32 with which the part before it ended, so
that the bits are those of one launch. The other kernels have a block for each chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx

from ..kernels.launch import MOST_MULTIPLICATIONS, Arrays
from .fused import KernelInputs
from .tiling import Tiling

#: The chunks that a block goes through in one launch. A step has some 2e5 multiplications for heads of 128, which the
#: half of an M1's core that a block keeps busy does in 5 us; with ten times that for barriers and loads, a second.
MOST_STEPS = 16_384

# (tiling, inputs, further arrays...) -> the outputs of a scan's launch.
Scan = Callable[..., list[mx.array]]
# The arrays that have a row for each token. The others have one for each chunk.
_BY_TOKEN = ("q", "k", "v", "mask", "dy")


def scan(run: Scan, tiling: Tiling, x: KernelInputs, prepared: Arrays) -> list[mx.array]:
    """Return y, states, u and the last state, as `run` writes them for the whole row."""
    parts = _parts(tiling)
    if len(parts) == 1:
        return run(tiling, x, prepared)
    outputs: list[list[mx.array]] = []
    state = x.initial
    for first, last in parts:
        part, inputs, cut = _part(tiling, x, prepared, first, last)
        *written, state = run(part, replace(inputs, initial=state), cut)
        outputs.append(written)
    return [*_joined(outputs), state]


def reverse(run: Scan, tiling: Tiling, x: KernelInputs, prepared: Arrays, cotangents: Arrays) -> list[mx.array]:
    """Return d_states, d_right, dv and the gradient of the initial state, as `run` writes them for the whole row."""
    parts = _parts(tiling)
    if len(parts) == 1:
        return run(tiling, x, prepared, cotangents)
    outputs: list[list[mx.array]] = []
    d_state = cotangents["d_last"]
    for first, last in reversed(parts):
        part, inputs, cut = _part(tiling, x, prepared | {"dy": cotangents["dy"]}, first, last)
        of_part = {"dy": cut.pop("dy"), "d_last": d_state}
        d_states, d_right, dv, d_state = run(part, inputs, cut, of_part)
        outputs.insert(0, [dv, d_states, d_right])
    dv, d_states, d_right = _joined(outputs)
    return [d_states, d_right, dv, d_state]


def _parts(tiling: Tiling) -> list[tuple[int, int]]:
    """Return the first chunk of each part, and the one after its last: all of them in one part but on Metal."""
    steps = tiling.chunks
    if tiling.machine == "metal":
        x, y, z = tiling.scan_blocks
        chunk, slices = tiling.chunk, x * y * z * tiling.slice
        # A reverse scan multiplies the state, or its gradient, four times, and triangles of a chunk four times.
        multiplications = slices * chunk * 4 * (tiling.key_size + chunk)
        steps = max(1, min(MOST_STEPS, int(MOST_MULTIPLICATIONS / multiplications)))
    return list(pairwise([*range(0, tiling.chunks, steps), tiling.chunks]))


def _part(
    tiling: Tiling, x: KernelInputs, arrays: Arrays, first: int, last: int
) -> tuple[Tiling, KernelInputs, Arrays]:
    """Return the chunks from `first` to before `last`: their tiling, inputs and arrays."""
    start, end = first * tiling.chunk, min(last * tiling.chunk, tiling.length)

    def cut(name: str, array: mx.array) -> mx.array:
        return array[:, start:end] if name in _BY_TOKEN else array[:, :, first:last]

    inputs = {name: cut(name, array) for name, array in x.named(*_BY_TOKEN[:4]).items()}
    part = replace(tiling, length=end - start)
    return part, replace(x, **inputs), {name: cut(name, array) for name, array in arrays.items()}


def _joined(outputs: list[list[mx.array]]) -> list[mx.array]:
    """Join the outputs of parts, of which the first has a row for each token and the others one for each chunk."""
    return [
        mx.concatenate(list(arrays), axis=2 if number else 1)
        for number, arrays in enumerate(zip(*outputs, strict=True))
    ]
