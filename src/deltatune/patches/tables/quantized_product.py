"""Replaces mx.quantized_matmul with a product that unpacks the quantised matrix first if there are many rows.

MLX's product is made for the one or two rows of decoding. The patch is applied on CPUs and NVIDIA GPUs.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...ops.products.quantized_product import ROWS, Quantization, packed_product, serves
from ..patch_record import Function, Patch
from ..small_cases import describe_difference


def _quantized_matmul(upstream: Function) -> Function:
    def quantized_matmul(
        x: mx.array, w: mx.array, /, scales: mx.array, biases: Any = None, transpose: bool = True,
        group_size: Any = None, bits: Any = None, mode: str = "affine", *, stream: Any = None,
    ) -> mx.array:  # fmt: skip
        if stream is None and serves(x, w, scales):
            return packed_product(x, w, scales, biases, Quantization(transpose, group_size, bits, mode))
        options = {} if stream is None else {"stream": stream}
        return upstream(x, w, scales, biases, transpose, group_size, bits, mode, **options)

    return quantized_matmul


def _agrees(upstream: Function, ours: Function) -> str | None:
    """Compare a few rows with upstream's product on a CPU, for which no kernel has to be built."""
    keys = mx.random.split(mx.random.key(0))
    x, matrix = mx.random.normal((max(ROWS.values()), 128), key=keys[0]), mx.random.normal((128, 128), key=keys[1])
    packed = mx.quantize(matrix, 32, 4)
    both = [{"transpose": transpose, "group_size": 32, "bits": 4} for transpose in (True, False)]
    expected = [upstream(x[:4], *packed, **options, stream=mx.cpu) for options in both]
    return describe_difference(
        [ours(x, *packed, **options)[:4] for options in both], expected, 1e-4, "the unpacked product"
    )


PATCHES = (
    Patch(
        "mlx.core",
        "quantized_matmul",
        _quantized_matmul,
        _agrees,
        reason="it is made for one or two rows; with the rows of a training step, unpacking first is many times faster",
        without="Training on quantised weights is then many times slower on this machine.",
    ),
)
