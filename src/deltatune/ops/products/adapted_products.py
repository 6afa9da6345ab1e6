"""Linear layers with LoRA that read one input, as one differentiable function: y_i = x W_i^T + scale * (x A_i) B_i.

Alone, each adapter would read x for its own product forward, and x and its gradient for two more backward. Together
they read them once. MLX keeps the rule of one custom function in the graph in the place of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..functional import with_gradient
from ..recomputation import input_of
from .low_rank import add_product, add_products, as_matrix, both_products, columns_products, rows_products
from .quantized_product import Quantization, matrix_gradients, rows_times

# The arrays of each of several matrices.
Weights = list[list[mx.array]]


@dataclass(frozen=True)
class AdaptedMatrix:
    """A frozen matrix W [out, in], and the factors A [in, r] and B [r, out] of its update.

    `weight` is W alone or, if it is packed, its words, its scales, and its biases if there are any; `quantization` then
    says how, with its `transpose` true.
    """

    weight: Sequence[mx.array]
    a: mx.array
    b: mx.array
    quantization: Quantization | None = None


def adapted_products(x: mx.array, matrices: Sequence[AdaptedMatrix], scale: float) -> list[mx.array]:
    """Return x W^T + scale * (x A) B, [..., out], for each of the matrices, with gradients for x, factors and weights.

    x is [..., in], of the dtype of all matrices.
    """
    count = len(matrices)
    packings = [matrix.quantization for matrix in matrices]
    source = input_of(x)

    def forward(x: mx.array, weights: Weights, downs: list[mx.array], ups: list[mx.array]) -> list[mx.array]:
        rows = as_matrix(x)
        low_rank = rows_products(rows, downs)
        sums = [
            add_product(_product(rows, weight, packing), h, b, scale)
            for weight, packing, h, b in zip(weights, packings, low_rank, ups, strict=True)
        ]
        return [*(y.reshape(*x.shape[:-1], y.shape[-1]) for y in sums), *low_rank]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[Any, ...]:
        x, weights, downs, ups = primals
        cotangents = [as_matrix(dy) for dy in cotangents[:count]]
        both = [both_products(dy, h, b, scale) for dy, h, b in zip(cotangents, outputs[count:], ups, strict=True)]
        d_low_rank, d_ups = zip(*both, strict=True)
        bases = list(zip(cotangents, weights, packings, strict=True))
        dx = _gradient_of_rows(*bases[0])
        for base in bases[1:]:
            dx = _gradient_of_rows(*base, dx)
        dx = add_products(dx, d_low_rank, downs).reshape(x.shape)
        (x,) = source.again([x], d_low_rank)
        rows = as_matrix(x)
        d_weights = [_gradient_of_weight(rows, *base) for base in bases]
        d_downs = columns_products(rows, d_low_rank)
        return source.before(dx, d_downs), d_weights, d_downs, list(d_ups)

    arrays = x, [list(m.weight) for m in matrices], [m.a for m in matrices], [m.b for m in matrices]
    return list(with_gradient(forward, backward)(*arrays)[:count])


def _product(rows: mx.array, weight: list[mx.array], packing: Quantization | None) -> mx.array:
    """Return rows W^T."""
    return rows @ weight[0].T if packing is None else rows_times(rows, weight, packing, packing.transpose)


def _gradient_of_rows(
    dy: mx.array, weight: list[mx.array], packing: Quantization | None, onto: mx.array | None = None
) -> mx.array:
    """Return dy W, added to `onto`."""
    if packing is not None:
        return rows_times(dy, weight, packing, not packing.transpose, onto=onto)
    return dy @ weight[0] if onto is None else mx.addmm(onto, dy, weight[0])


def _gradient_of_weight(
    rows: mx.array, dy: mx.array, weight: list[mx.array], packing: Quantization | None
) -> list[mx.array]:
    """Return the gradients of the weight's arrays. MLX is lazy: those of frozen matrices are never computed."""
    return [dy.T @ rows] if packing is None else matrix_gradients(rows, weight, packing, dy)
