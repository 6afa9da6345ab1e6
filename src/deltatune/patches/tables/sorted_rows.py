"""Products of rows sorted by expert that read the right rows, wherever a model calls mx.gather_mm on a GPU.

mlx-lm's expert layers call it so for 64 pairs or more: a prompt's, or a batch's. Their activation is compiled for any
shape, which puts broadcasts before its products. A fused kernel leaves plain strides all the same; where none is built
(compiling.without_kernels) the broadcast's 0 stays, and on CUDA every row of an expert was read as its first.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import mlx.core as mx

from ...ops.experts.single_rows import single_rows
from ..patch import Function, core_record, differs

# TF32's mantissa has 10 bits; a wrong row is off by more than itself.
_BOUND = 1e-2


def _gather_mm(upstream: Function) -> Function:
    def gather_mm(
        a: mx.array, b: mx.array, /, lhs_indices: Any = None, rhs_indices: Any = None, *, sorted_indices: bool = False,
        stream: Any = None,
    ) -> mx.array:  # fmt: skip
        options = {"sorted_indices": sorted_indices} | ({} if stream is None else {"stream": stream})
        if not sorted_indices or a.ndim < 2 or a.shape[-2] != 1:
            return upstream(a, b, lhs_indices, rhs_indices, **options)
        # The result too, for its gradient is multiplied in the same way.
        return single_rows(upstream(single_rows(a), b, lhs_indices, rhs_indices, **options))

    return gather_mm


def _agrees(upstream: Function, ours: Function) -> str | None:
    """With the elementwise product, on rows with an axis that expand_dims made, and their gradient."""
    keys = mx.random.split(mx.random.key(0), 3)
    rows, cotangent = (mx.random.normal((8, 64), key=key) for key in keys[:2])
    matrices, experts = mx.random.normal((4, 64, 64), key=keys[2]), mx.array([0, 0, 1, 1, 1, 3, 3, 3], mx.uint32)

    def product(x: mx.array) -> mx.array:
        y = ours(mx.expand_dims(x, -2), matrices, rhs_indices=experts, sorted_indices=True)
        return y.squeeze(-2)

    def elementwise(x: mx.array) -> mx.array:
        return (x[..., None] * matrices[experts]).sum(axis=-2)

    found, expected = (mx.vjp(each, [rows], [cotangent]) for each in (product, elementwise))
    return differs([*chain(*found)], [*chain(*expected)], _BOUND, "the elementwise product")


PATCHES = (
    core_record(
        "gather_mm",
        _gather_mm,
        _agrees,
        reason="MLX's sorted products on a GPU take the stride of an axis of one for the distance of two rows",
        without="Layers of experts that run upstream's code compute wrong on this GPU.",
    ),
)
