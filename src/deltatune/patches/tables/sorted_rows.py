"""Replaces mx.gather_mm on GPUs so that products of rows sorted by expert read the right rows.

The fault: MLX's sorted products take the stride of an axis of length 1 for the distance between two rows. mlx-lm's
layers of experts call them for 64 pairs of token and expert or more, with the output of an activation that is compiled
for any shape and therefore broadcasts. Without fused kernels (machine/compiling.without_kernels) that output has a
stride of 0 there, and on CUDA every row of an expert is read as its first one.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import mlx.core as mx

from ...ops.experts.tiles import single_rows
from ..patch_record import ALWAYS, Function, Patch
from ..small_cases import describe_difference

# Products may be computed in TF32, with a mantissa of 10 bits. A wrong row has a relative error above 1.
_BOUND = 1e-2


def _gather_mm(upstream: Function) -> Function:
    def gather_mm(
        a: mx.array, b: mx.array, /, lhs_indices: Any = None, rhs_indices: Any = None, *, sorted_indices: bool = False,
        stream: Any = None,
    ) -> mx.array:  # fmt: skip
        options = {"sorted_indices": sorted_indices} | ({} if stream is None else {"stream": stream})
        if not sorted_indices or a.ndim < 2 or a.shape[-2] != 1:
            return upstream(a, b, lhs_indices, rhs_indices, **options)
        # The result needs it too, because its gradient goes through a product of the same kind.
        return single_rows(upstream(single_rows(a), b, lhs_indices, rhs_indices, **options))

    return gather_mm


def _agrees(upstream: Function, ours: Function) -> str | None:
    """Compare with an elementwise product: rows with an axis that expand_dims adds, and their gradient."""
    keys = mx.random.split(mx.random.key(0), 3)
    rows, cotangent = (mx.random.normal((8, 64), key=key) for key in keys[:2])
    matrices, experts = mx.random.normal((4, 64, 64), key=keys[2]), mx.array([0, 0, 1, 1, 1, 3, 3, 3], mx.uint32)

    def product(x: mx.array) -> mx.array:
        y = ours(mx.expand_dims(x, -2), matrices, rhs_indices=experts, sorted_indices=True)
        return y.squeeze(-2)

    def elementwise(x: mx.array) -> mx.array:
        return (x[..., None] * matrices[experts]).sum(axis=-2)

    actual, expected = (mx.vjp(function, [rows], [cotangent]) for function in (product, elementwise))
    return describe_difference([*chain(*actual)], [*chain(*expected)], _BOUND, "the elementwise product")


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
