"""Replaces functions so that products of rows sorted by expert read the right rows, and on CUDA the right matrices.

The fault: MLX's sorted products take the stride of an axis of length 1 for the distance between two rows. mlx-lm's
layers of experts call them for 64 pairs of token and expert or more, with the output of an activation that is compiled
for any shape and therefore broadcasts. Without fused kernels (machine/compiling.without_kernels) that output has a
stride of 0 there, and on CUDA every row of an expert is read as its first one.

Where a file holds gate and up in one array, mlx-lm slices them, so there are gaps between one expert's matrix and the
next. MLX's products on CUDA ignore the gaps and would multiply with other experts' matrices, in training and inference.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...ops.experts.tiles import single_rows
from ..patch_record import ALWAYS, Function, Patch
from ..small_cases import describe_difference, drawn

# Products may be computed in TF32, with a mantissa of 10 bits. A wrong row has a relative error above 1.
_BOUND = 1e-2


def _gather_mm(upstream: Function) -> Function:
    def gather_mm(a: mx.array, b: mx.array, /, *indices: Any, **options: Any) -> mx.array:
        if not options.get("sorted_indices") or a.ndim < 2 or a.shape[-2] != 1:
            return upstream(a, b, *indices, **options)
        # The result needs it too, because its gradient goes through a product of the same kind.
        return single_rows(upstream(single_rows(a), b, *indices, **options))

    return gather_mm


def _agrees(upstream: Function, ours: Function) -> str | None:
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
    return describe_difference([*chain(*actual)], [*chain(*expected)], _BOUND, "the elementwise product")


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


PATCHES = (
    Patch(
        "mlx.core",
        "gather_mm",
        _gather_mm,
        _agrees,
        reason="MLX's sorted products on a GPU take the stride of an axis of length 1 for the distance between rows",
        without="Layers of experts that run upstream's code then compute wrong results on this GPU.",
        needed_for=ALWAYS,
    ),
)
# These are for CUDA alone.
ON_CUDA = (
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
