"""RMS norms with a weight, together with the residual sums around them, as one kernel forward and one backward.

MLX's backward pass always sums the weight's gradient over all tokens, which a frozen weight does not need, and adds the
residual stream's two gradients in a pass of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import mlx.core as mx

from ..functional import not_differentiated_again, refuse_second_derivative, with_gradient
from ..kernels.launch import Arrays, Device, Kernel, Plan
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator, KernelWorkload, in_each_dtype
from ..operator.measure import in_float64, random_arrays
from ..recomputation import is_small_case, large_enough, note
from .passes import BOUNDS

# Groups of 32 lanes in a block, which takes one row each above this width, and all the same row beyond.
GROUPS, _OF_A_GROUP = 4, 512
# The widest row: a lane holds 8 pieces of it, twice, in its registers.
WIDEST = 8 * 8 * 32 * GROUPS
FILES = ("passes/weighted_norm.h",)
FORWARD = Kernel(
    name="weighted_norm_forward",
    files=FILES,
    values=("GROUPS", "SHARING", "PIECES"),
    arrays=("eps", "x", "other", "weight", "total", "y"),
    memory="WeightedNormMemory",
    memory_values=("GROUPS",),
)
BACKWARD = replace(FORWARD, name="weighted_norm_backward", arrays=("eps", "h", "weight", "dy", "d_sum", "dx"))


def weighted_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in fp32 and rounded once.

    x is [..., W], W a multiple of 8, and the weight [W]; `covers` says whether they fit. `mx.fast.rms_norm` rounds the
    norm before it multiplies it by the weight.
    """
    return _called("alone", eps, x, weight)[0]


def branch_norm(x: mx.array, weight: mx.array, eps: float) -> list[mx.array]:
    """Return x itself and its weighted_norm, for a residual branch that is added to x.

    The gradients of both are added in the norm's backward pass. The arguments are those of weighted_norm.
    """
    return _called("branch", eps, x, weight)


def sum_norm(x: mx.array, other: mx.array, weight: mx.array, eps: float) -> list[mx.array]:
    """Return x + other and its weighted_norm, and add the gradients of both in the norm's backward pass.

    `other` has x's shape and dtype; further arguments are those of weighted_norm.
    """
    return _called("sum", eps, x, other, weight)


def covers(x: mx.array, weight: mx.array, *others: mx.array) -> bool:
    """Whether the kernels can compute with x, a weight, and the arrays added to x."""
    match = all(other.shape == x.shape and other.dtype == x.dtype for other in others)
    floats = x.dtype in BOUNDS and weight.dtype in BOUNDS
    width = x.shape[-1]
    return match and floats and x.size > 0 and weight.shape == (width,) and width % 8 == 0 and width <= WIDEST


def serves(x: mx.array, weight: mx.array, eps: float, *others: mx.array) -> bool:
    """Whether the kernels are to be used: they cover these arrays, are faster, and were found right on this machine."""
    fits = large_enough(x) and covers(x, weight, *others)
    return fits and OPERATOR.serves(x.shape[-1], x.dtype, weight.dtype, float(eps))


_NO_SECOND_DERIVATIVE = "An RMS norm has no second derivative: its backward pass is written by hand."


def _called(kind: str, eps: float, x: mx.array, *more: mx.array) -> list[mx.array]:
    if not is_small_case():
        return list(_function(kind, float(eps))(x, *more))
    note("weighted norm")
    *others, weight = more
    total = sum(others, start=x)
    y = mx.fast.rms_norm(total, weight, eps)
    return [y] if kind == "alone" else [total, y]


@cache
def _function(kind: str, eps: float) -> Any:
    """Return the function of `x` (alone, branch) or `x, other` (sum) and `weight`, with its gradient."""

    def forward(x: mx.array, *more: mx.array) -> list[mx.array]:
        *others, weight = more
        inputs: Arrays = {"x": x, "weight": weight} | dict(zip(("other",), others, strict=False))
        results = _launch(FORWARD, inputs, ("total", "y") if others else ("y",), eps)
        return [x, *results] if kind == "branch" else results

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        x, *others, weight = primals
        *d_sum, dy = [cotangents] if isinstance(cotangents, mx.array) else cotangents
        h = outputs[0] if kind == "sum" else x
        gradient = not_differentiated_again(backward, refuse_second_derivative(_NO_SECOND_DERIVATIVE))
        dx = gradient(h, weight, dy.astype(h.dtype), *(d.astype(h.dtype) for d in d_sum))
        return [dx] * (1 + len(others)) + [_weight_gradient(h, weight, dy.astype(h.dtype), eps)]

    def backward(h: mx.array, weight: mx.array, dy: mx.array, *d_sum: mx.array) -> mx.array:
        inputs: Arrays = {"h": h, "weight": weight, "dy": dy} | dict(zip(("d_sum",), d_sum, strict=False))
        return _launch(BACKWARD, inputs, ("dx",), eps)[0]

    return with_gradient(forward, vjp)


def _weight_gradient(h: mx.array, weight: mx.array, dy: mx.array, eps: float) -> mx.array:
    """The weight's gradient by MLX's operation, which only runs where something uses it."""
    # h is an argument: mx.vjp walks through everything that an array which is none was computed from.
    return mx.vjp(lambda h, weight: [mx.fast.rms_norm(h, weight, eps)], [h, weight], [dy])[1][1]


def _launch(kernel: Kernel, inputs: Arrays, outputs: tuple[str, ...], eps: float) -> list[mx.array]:
    x, weight = next(iter(inputs.values())), inputs["weight"]
    return kernel(inputs, _plan(tuple(inputs), outputs, x.shape, x.dtype, weight.dtype, eps))


@lru_cache(maxsize=256)
def _plan(
    names: tuple[str, ...],
    outputs: tuple[str, ...],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    _weight_dtype: mx.Dtype,
    eps: float,
) -> Plan:
    """Return the plan for inputs of these names: the first has the rows, and is of this shape and dtype."""
    *lead, width = shape
    sharing = 1 if width <= _OF_A_GROUP else GROUPS
    rows = " * ".join(f"{names[0]}_shape[{i}]" for i in range(len(lead))) or "1"
    return Plan(
        outputs=dict.fromkeys(outputs, (shape, dtype)),
        values={"GROUPS": GROUPS, "SHARING": sharing, "PIECES": -(-width // (8 * 32 * sharing))},
        blocks=(-(-math.prod(lead) * sharing // GROUPS), 1, 1),
        groups=GROUPS,
        written={"eps": f"{eps!r}f"},
        sizes=(rows, f"{names[0]}_shape[{len(lead)}]"),
    )


def trial_case(width: int, dtype: mx.Dtype, weight_dtype: mx.Dtype, eps: float, rows: int = 7) -> Case[Device]:
    """Return the case of the three functions on rows that leave a block's last groups without one."""
    x, other, d_sum, dy, weight = random_arrays([((3, rows, width), dtype)] * 4 + [((width,), weight_dtype)])

    def ours(x: mx.array, other: mx.array, weight: mx.array) -> list[mx.array]:
        alone = weighted_norm(x, weight, eps)
        residual, branch = branch_norm(alone + other, weight, eps)
        return [alone, branch, *sum_norm(residual, other, weight, eps)]

    def plain(x: mx.array, other: mx.array, weight: mx.array) -> list[mx.array]:
        alone = mx.fast.rms_norm(x, weight, eps)
        residual = alone + other
        total = residual + other
        return [alone, mx.fast.rms_norm(residual, weight, eps), total, mx.fast.rms_norm(total, weight, eps)]

    def differentiated(function: Any, arrays: Sequence[mx.array]) -> list[mx.array]:
        *primals, dy, d_sum = arrays
        outputs, gradients = mx.vjp(function, primals, [dy, d_sum, d_sum, dy])
        return [*outputs, *gradients]

    arrays = (x, other, weight, dy, d_sum)
    return Case(
        name=f"the norm of {width} {dtype}",
        results=("alone", "branch", "total", "norm of total", "dx", "dother", "dweight"),
        call=by_kernels(lambda: differentiated(ours, arrays)),
        truth=lambda: in_float64(partial(differentiated, plain), arrays),
        bound=BOUNDS[dtype],
        like=arrays,
    )


def _workloads(quick: bool) -> list[KernelWorkload]:
    width, rows = (512, 2) if quick else (1024, 1365)
    return in_each_dtype("sum and norm", lambda dtype: trial_case(width, dtype, dtype, 1e-6, rows))


OPERATOR = KernelOperator("passes", trial_case, workloads=_workloads)
