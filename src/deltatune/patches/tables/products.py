"""Replaces products that MLX computes slowly: those in 16 bits on CPUs, and those of many rows with packed matrices.

A CPU computes linear layers and heads in 16 bits thirty times faster in fp32. mx.quantized_matmul is made for the one
or two rows of decoding; where there are many, unpacking the matrix first is faster on CPUs and NVIDIA GPUs, and may be
on Metal.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...ops.products.choice import unpacking_is_faster
from ...ops.products.quantized_product import (
    ROWS,
    Quantization,
    narrow_product,
    packed_product,
    serves,
    serves_narrow,
)
from ..patch_record import Check, Function, Patch
from ..small_cases import describe_difference, drawn

_WIDTH = 64
# A result is rounded to bf16 once, by either half a unit in the last place.
_BOUND = 2.0**-7


def _linear(upstream: Function) -> Function:
    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        if not serves_narrow(x, self["weight"]):
            return upstream(self, x)
        y = narrow_product(x, self["weight"])
        return y + self["bias"] if "bias" in self else y

    return __call__


def _as_linear(upstream: Function) -> Function:
    def as_linear(self: Any, x: mx.array) -> mx.array:
        return narrow_product(x, self["weight"]) if serves_narrow(x, self["weight"]) else upstream(self, x)

    return as_linear


def _same(name: str) -> Check:
    """Build a check that compares a layer's products and their gradients in bf16 with upstream's in fp32."""

    def check(upstream: Function, ours: Function) -> str | None:
        cls = upstream.__globals__[name]
        layer = cls(_WIDTH, _WIDTH)
        x = drawn(1, 3, _WIDTH)

        def results(function: Function, dtype: mx.Dtype) -> list[mx.array]:
            arrays = {key: value.astype(mx.bfloat16).astype(dtype) for key, value in layer.parameters().items()}

            def loss(x: mx.array, arrays: dict[str, mx.array]) -> mx.array:
                layer.update(arrays)
                return function(layer, x).astype(mx.float32).square().sum()

            _, (dx, gradients) = mx.value_and_grad(loss, argnums=(0, 1))(x.astype(dtype), arrays)
            layer.update(arrays)
            return [function(layer, x.astype(dtype)), dx, *gradients.values()]

        return describe_difference(
            results(ours, mx.bfloat16), results(upstream, mx.float32), _BOUND, "the product in fp32"
        )

    return check


_RECORD: dict[str, Any] = {
    "reason": "a CPU computes products in 16 bits thirty times slower than in fp32",
    "without": "Training and answers with weights in 16 bits are then many times slower on this machine.",
}
NARROW = (
    Patch("mlx.nn.layers.linear", "Linear.__call__", _linear, _same("Linear"), **_RECORD),
    Patch("mlx.nn.layers.embedding", "Embedding.as_linear", _as_linear, _same("Embedding"), **_RECORD),
)


def _quantized_matmul(upstream: Function) -> Function:
    def quantized_matmul(
        x: mx.array, w: mx.array, /, scales: mx.array, biases: Any = None, transpose: bool = True,
        group_size: Any = None, bits: Any = None, mode: str = "affine", *, stream: Any = None,
    ) -> mx.array:  # fmt: skip
        quantization = Quantization(transpose, group_size, bits, mode)
        if stream is None and (serves(x, w, scales) or unpacking_is_faster(x, w, quantization)):
            return packed_product(x, w, scales, biases, quantization)
        options = {} if stream is None else {"stream": stream}
        return upstream(x, w, scales, biases, transpose, group_size, bits, mode, **options)

    return quantized_matmul


def _agrees(upstream: Function, ours: Function) -> str | None:
    """Compare a few rows with upstream's product on a CPU, for which no kernel has to be built."""
    keys = mx.random.split(mx.random.key(0))
    x = mx.random.normal((max(ROWS.values()), 128), key=keys[0])
    matrix = mx.random.normal((128, 128), key=keys[1])
    packed = mx.quantize(matrix, 32, 4)
    both = [{"transpose": transpose, "group_size": 32, "bits": 4} for transpose in (True, False)]
    expected = [upstream(x[:4], *packed, **options, stream=mx.cpu) for options in both]
    return describe_difference(
        [ours(x, *packed, **options)[:4] for options in both], expected, 1e-4, "the unpacked product"
    )


PACKED = (
    Patch(
        "mlx.core",
        "quantized_matmul",
        _quantized_matmul,
        _agrees,
        reason="it is made for one or two rows; with the rows of a training step, unpacking first is many times faster",
        without="Training on quantised weights is then many times slower on this machine.",
    ),
)
