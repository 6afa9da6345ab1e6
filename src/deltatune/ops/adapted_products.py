"""Linear layers with LoRA that read one input, as one differentiable function: y_i = x W_i^T + scale * (x A_i) B_i.

Alone, each adapter would read x for its own product forward, and x and its gradient for two more backward. Together
they read them once. MLX keeps the rule of one custom function in the graph in the place of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .kernels.launch import Execute
from .low_rank import add_product, add_products, as_matrix, both_products, columns_products, rows_products


@dataclass(frozen=True)
class AdaptedMatrix:
    """A frozen matrix W [out, in], and the factors A [in, r] and B [r, out] of its update."""

    weight: mx.array
    a: mx.array
    b: mx.array


def adapted_products(
    x: mx.array, matrices: Sequence[AdaptedMatrix], scale: float, *, execute: Execute | None = None
) -> list[mx.array]:
    """Return x W^T + scale * (x A) B for each of the matrices, with gradients for x and all factors and weights.

    Args:
        x: [..., in], of the dtype of all matrices.
        matrices: the matrices and their factors.
        scale: the factor of the updates.
        execute: runs a launch; None decides whether to use kernels, and then runs them on the GPU.

    Returns:
        [..., out] for each matrix.
    """
    count = len(matrices)

    def forward(x: mx.array, *arrays: mx.array) -> list[mx.array]:
        weights, downs, ups = _thirds(arrays)
        rows = as_matrix(x)
        low_rank = rows_products(rows, downs, execute=execute)
        sums = [
            add_product(rows @ weight.T, h, b, scale, execute=execute)
            for weight, h, b in zip(weights, low_rank, ups, strict=True)
        ]
        return [*(y.reshape(*x.shape[:-1], y.shape[-1]) for y in sums), *low_rank]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        x, *arrays = primals
        weights, downs, ups = _thirds(arrays)
        rows, cotangents = as_matrix(x), [as_matrix(dy) for dy in cotangents[:count]]
        both = [
            both_products(dy, h, b, scale, execute=execute)
            for dy, h, b in zip(cotangents, outputs[count:], ups, strict=True)
        ]
        d_low_rank, d_ups = zip(*both, strict=True)
        dx = cotangents[0] @ weights[0]
        for dy, weight in zip(cotangents[1:], weights[1:], strict=True):
            dx = mx.addmm(dx, dy, weight)
        dx = add_products(dx, d_low_rank, downs, execute=execute).reshape(x.shape)
        # MLX is lazy: the gradients of frozen matrices are never computed.
        d_weights = [dy.T @ rows for dy in cotangents]
        return [dx, *d_weights, *columns_products(rows, d_low_rank, execute=execute), *d_ups]

    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    arrays = [getattr(matrix, name) for name in ("weight", "a", "b") for matrix in matrices]
    return list(function(x, *arrays)[:count])


def _thirds(arrays: Sequence[mx.array]) -> tuple[Sequence[mx.array], Sequence[mx.array], Sequence[mx.array]]:
    count = len(arrays) // 3
    return arrays[:count], arrays[count : 2 * count], arrays[2 * count :]
