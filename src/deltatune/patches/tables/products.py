"""Replaces products that MLX computes slowly, and those on a GPU that read wrong rows or matrices.

A CPU computes linear layers and heads in 16 bits thirty times faster in fp32. mx.quantized_matmul is made for the one
or two rows of decoding; where there are many, unpacking the matrix first is faster on CPUs and NVIDIA GPUs, and may be
on Metal.

MLX's sorted products take the stride of an axis of length 1 for the distance between two rows. mlx-lm's layers of
experts call them for 64 pairs of token and expert or more, with the output of an activation that is compiled for any
shape and therefore broadcasts. Without fused kernels that output has a stride of 0 there, and on CUDA every row of an
expert is read as its first one. Where a file holds gate and up in one array, mlx-lm slices them, so there are gaps
between one expert's matrix and the next; MLX's products on CUDA ignore the gaps, in training and inference.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...ops.experts.tiles import single_rows
from ...ops.products.choice import unpacking_is_faster
from ...ops.products.quantized_product import (
    ROWS,
    Quantization,
    narrow_product,
    packed_product,
    serves,
    serves_narrow,
)
from ..patch_record import ALWAYS, Check, Function, Patch
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


# Products may be computed in TF32, with a mantissa of 10 bits. A wrong row has a relative error above 1.
_TF32_BOUND = 1e-2


def _gather_mm(upstream: Function) -> Function:
    def gather_mm(a: mx.array, b: mx.array, /, *indices: Any, **options: Any) -> mx.array:
        if not options.get("sorted_indices") or a.ndim < 2 or a.shape[-2] != 1:
            return upstream(a, b, *indices, **options)
        # The result needs it too, because its gradient goes through a product of the same kind.
        return single_rows(upstream(single_rows(a), b, *indices, **options))

    return gather_mm


def _reads_right_rows(upstream: Function, ours: Function) -> str | None:
    """Compare with an elementwise product: rows with an axis that expand_dims adds, and their gradient."""
    keys = mx.random.split(mx.random.key(0), 3)
    rows, cotangent = (mx.random.normal((8, 64), key=key) for key in keys[:2])
    matrices = mx.random.normal((4, 64, 64), key=keys[2])
    experts = mx.array([0, 0, 1, 1, 1, 3, 3, 3], mx.uint32)

    def product(x: mx.array) -> mx.array:
        y = ours(mx.expand_dims(x, -2), matrices, rhs_indices=experts, sorted_indices=True)
        return y.squeeze(-2)

    def elementwise(x: mx.array) -> mx.array:
        return (x[..., None] * matrices[experts]).sum(axis=-2)

    actual, expected = (mx.vjp(function, [rows], [cotangent]) for function in (product, elementwise))
    return describe_difference([*chain(*actual)], [*chain(*expected)], _TF32_BOUND, "the elementwise product")


def without_gaps(weights: Iterable[tuple[str, mx.array]]) -> list[tuple[str, mx.array]]:
    """Copy every named array of three dimensions that is a slice of a larger one, lazily, to be contiguous."""
    return [
        (name, mx.contiguous(array) if isinstance(array, mx.array) and array.ndim == 3 else array)
        for name, array in weights
    ]


def _load_weights(upstream: Function) -> Function:
    def load_weights(self: Any, file_or_weights: Any, strict: bool = True) -> Any:
        # Arrays that MLX reads from a file itself have no gaps.
        if not isinstance(file_or_weights, str):
            file_or_weights = without_gaps(file_or_weights)
        return upstream(self, file_or_weights, strict)

    return load_weights


def _loads_alike(upstream: Function, ours: Function) -> str | None:
    weights = drawn(0, 2, 4, 6)
    layers = nn.Module(), nn.Module()
    for layer, load in zip(layers, (upstream, ours), strict=True):
        layer.weight = mx.zeros((2, 2, 6))
        load(layer, [("weight", weights[:, :2])])
    return describe_difference([layers[0].weight], [layers[1].weight], 1e-6, "the weights that were given")


SORTED_ROWS = (
    Patch(
        "mlx.core",
        "gather_mm",
        _gather_mm,
        _reads_right_rows,
        reason="MLX's sorted products on a GPU take the stride of an axis of length 1 for the distance between rows",
        without="Layers of experts that run upstream's code then compute wrong results on this GPU.",
        needed_for=ALWAYS,
    ),
)
# These are for CUDA alone.
WITHOUT_GAPS = (
    Patch(
        module="mlx.nn.layers.base",
        name="Module.load_weights",
        reason="MLX's products on CUDA multiply with other experts' matrices if there are gaps between them",
        without="Mixtures of experts whose files hold gate and up in one array then compute wrong results on this GPU.",
        needed_for=ALWAYS,
        replacement=_load_weights,
        check=_loads_alike,
    ),
)
