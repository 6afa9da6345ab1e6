"""The origins of arrays in a decoding step, so that a linear layer is fused with the operations around it.

A model's layers call a norm, linear layers and a sum one after the other. Each notes the inputs of its result here; the
next one computes its own result from those, and MLX never computes an array that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from ..tracing import trace
from .linear_token import LinearToken, LowRank, RowNorm, linear_token, serves


class Matrix(NamedTuple):
    """The matrix of a linear layer, [out, in], with its adapter: weight + b a.

    a is [r, in], and b [out, r], times the adapter's scale; both are None without an adapter.
    """

    weight: mx.array
    a: mx.array | None = None
    b: mx.array | None = None


@dataclass(frozen=True)
class _Normed:
    x: mx.array
    norm: RowNorm


@dataclass(frozen=True)
class _Product:
    call: LinearToken
    matrix: Matrix


def normed(y: mx.array, x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Note that y is the RMS norm of x, for the linear layers that read it; return y."""
    if trace.current().next_tokens:
        trace.current().known.note(y, _Normed(x, RowNorm(weight, eps)))
    return y


def product(x: mx.array, matrix: Matrix) -> mx.array | None:
    """Multiply one token of each row, x [B, 1, in], by a matrix, and its adapter; return None if no kernel serves."""
    if x.ndim != 3 or x.shape[1] != 1:
        return None
    noted = trace.current().known.of(x, _Normed)
    call = LinearToken(x, matrix.weight) if noted is None else LinearToken(noted.x, matrix.weight, noted.norm)
    return _called(_with_adapters(call, matrix.a, matrix.b), matrix)


def swiglu(gate: mx.array, up: mx.array) -> mx.array | None:
    """Return silu(gate) up where both are products of the same rows that one kernel computes; else None."""
    first, second = _product_of(gate), _product_of(up)
    if first is None or second is None or first.call.x is not second.call.x or first.call.norm != second.call.norm:
        return None
    a, b = _joined_factors([first.matrix, second.matrix])
    of_each = [] if b is None else list(mx.split(b, [first.matrix.weight.shape[0]]))
    call = replace(first.call, second=second.matrix.weight, low_rank=None)
    return _called(_with_adapters(call, a, *of_each), first.matrix)


def total(x: mx.array, y: mx.array) -> mx.array:
    """Return x + y, where possible by the kernel of the product that y is."""
    noted = _product_of(y)
    if noted is None or noted.call.residual is not None:
        return x + y
    together = _called(replace(noted.call, residual=x), noted.matrix)
    return x + y if together is None else together


def joined(matrices: Sequence[Matrix]) -> Matrix:
    """Return several matrices as one that gives their products beside one another; it is computed now.

    Their adapters become one, too. Factors that are arguments of the step are not computed now.
    """
    weight = mx.concatenate([matrix.weight for matrix in matrices])
    mx.eval(weight)
    return Matrix(weight, *_joined_factors(matrices))


def _joined_factors(matrices: Sequence[Matrix]) -> tuple[mx.array, mx.array] | tuple[None, None]:
    """Return a and b of all adapters together, if any; b has zeros where an adapter adds nothing."""
    ranks = [0 if matrix.a is None else matrix.a.shape[0] for matrix in matrices]
    if not any(ranks):
        return None, None
    rows = []
    for place, matrix in enumerate(matrices):
        b = mx.zeros((matrix.weight.shape[0], 0), matrix.weight.dtype) if matrix.b is None else matrix.b
        rows.append(mx.pad(b, [(0, 0), (sum(ranks[:place]), sum(ranks[place + 1 :]))]))
    a = mx.concatenate([matrix.a for matrix in matrices if matrix.a is not None])
    b = mx.concatenate(rows)
    if trace.current().factors is None:
        mx.eval(a, b)
    return a, b


def _product_of(y: mx.array) -> _Product | None:
    told = trace.current()
    return told.known.of(y, _Product) if told.next_tokens else None


def _with_adapters(call: LinearToken, *factors: mx.array | None) -> LinearToken:
    """Return the call with the update of adapters, if any, of which `factors` are a, b and the second weight's b."""
    there = [factor for factor in factors if factor is not None]
    of_step = trace.current().factors
    if of_step is not None:
        there = of_step.kept(*there)
    return replace(call, low_rank=LowRank(*there)) if there else call


def _called(call: LinearToken, matrix: Matrix) -> mx.array | None:
    if not serves(call):
        return None
    y = linear_token(call)
    trace.current().known.note(y, _Product(call, matrix))
    return y
