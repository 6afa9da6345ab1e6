"""packed_product(): mx.quantized_matmul that unpacks the matrix first, for as many rows as a training step has.

MLX's own multiplies packed numbers one at a time on a CPU, and on CUDA without what the tensor cores could give: made
for a row or two. Nothing unpacked waits for the backward pass, which unpacks again; a large matrix goes in slabs.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx

from ..machine import backend
from .functional import is_floating, promoted

# From how many rows on it pays, and what is unpacked at once. Metal multiplies packed numbers in tiles of its own.
ROWS = {"cpu": 8, "cuda": 64}
SLAB_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}


class Packing(NamedTuple):
    """How a matrix [..., out, in] is stored, and whether rows are [..., in] (transpose) or [..., out]."""

    transpose: bool
    group_size: int | None
    bits: int | None
    mode: str

    @property
    def storage(self) -> dict[str, Any]:
        """What mx.dequantize asks."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


def serves(x: mx.array, w: mx.array, scales: mx.array) -> bool:
    """Whether unpacking pays here for rows x [..., K] and a packed matrix, or a matrix for each leading index of x."""
    device = backend.device()
    least = ROWS.get(device)
    if device == "cuda" and scales.shape[-1] == 1:
        least = 1  # MLX's product there is wrong for one group of 64 inputs, and has nothing for fewer.
    if least is None or not is_floating(x) or x.ndim < 2 or x.size == 0:
        return False
    if w.ndim == 2:
        return math.prod(x.shape[:-1]) >= least
    lead = tuple(w.shape[:-2])
    return x.shape[-2] >= least and tuple(x.shape[:-2])[-len(lead) :] == lead


def packed_product(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, packing: Packing) -> mx.array:
    """As mx.quantized_matmul(x, w, scales, biases, *packing), of the same type, for what `serves`.

    Products are fp32 on a CPU, of that type elsewhere. Gradients reach x, and scales and biases that are floats.
    """
    stored = [scales] if biases is None else [scales, biases]

    def forward(x: mx.array, w: mx.array, *stored: mx.array) -> mx.array:
        return _times(x, w, stored, packing, packing.transpose)

    def backward(primals: Any, dy: mx.array, _output: mx.array) -> list[mx.array]:
        x, w, *stored = primals
        dx = _times(dy, w, stored, packing, not packing.transpose)
        rest = [mx.zeros_like(array) for array in stored]
        if is_floating(stored[0]):
            # Computed only if somebody trains them.
            _, rest = mx.vjp(lambda *stored: [forward(x, w, *stored)], stored, [dy])
        return [dx.astype(x.dtype), mx.zeros_like(w), *rest]

    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    return function(x, w, *stored)


def _times(x: mx.array, w: mx.array, stored: Any, packing: Packing, transpose: bool) -> mx.array:
    """x times the unpacked matrix, slab of rows by slab of rows of it."""
    result = promoted(x.dtype, stored[0].dtype) if is_floating(stored[0]) else x.dtype
    kind = mx.float32 if backend.device() == "cpu" else result
    rows = x.astype(kind)
    stored = [array.astype(kind) if is_floating(array) else array for array in stored]
    inputs = w.shape[-1] * 32 // packing.bits if packing.bits else 8 * w.shape[-1]
    at_once = max(1, SLAB_BYTES[backend.device()] // (kind.size * inputs)) if w.ndim == 2 else w.shape[-2]
    found: list[mx.array] = []
    for start, stop in pairwise([*range(0, w.shape[-2], at_once), w.shape[-2]]):
        part = [array[..., start:stop, :] for array in (w, *stored)]
        if found:
            part = mx.depends(part, [found[-1]])
        matrix = unpacked(*part, dtype=kind, **packing.storage)
        if transpose:
            found.append(rows @ matrix.swapaxes(-1, -2))
        else:
            y = rows[..., start:stop] @ matrix
            found = [found[0] + y] if found else [y]
    return (found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)).astype(result)


def unpacked(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    global_scale: mx.array | None = None,
    *,
    dtype: mx.Dtype | None = None,
    **packing: Any,
) -> mx.array:
    """mx.dequantize, which takes one `global_scale` at a time, for one [E] of each of E matrices too."""
    if global_scale is None:
        return mx.dequantize(w, scales, biases, dtype=dtype, **packing)
    each = [
        mx.dequantize(w[i], scales[i], None, global_scale=global_scale[i], dtype=dtype, **packing)
        for i in range(w.shape[0])
    ]
    return mx.stack(each)
