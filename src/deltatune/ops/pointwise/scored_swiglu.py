"""The gradients of an expert's activation silu(gate) * x and of its score, in one pass.

By MLX's operations the scores, the activation, its gradient and the gradient of the scores pass over memory nine times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..kernels.launch import Arrays, Device, Outputs
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator
from ..operator.measure import in_float64, random_arrays
from .passes import BOUNDS, LEAST, by_lane, wide

# How many lanes share a row, and how many elements a lane takes at a time.
_LANES, _PIECE = 32, 8


def gradients(
    gate: mx.array, x: mx.array, d: mx.array, score: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Return h = silu(gate) * x, the gradients of gate and of x, and that of the scores, computed in fp32.

    gate, x and d, the gradient of score * h without that factor, are [R, I] of one dtype, I a multiple of 8, as are the
    first three results; the scores and their gradient are [R] fp32.
    """
    inputs: Arrays = {"gate": gate, "x": x, "d": d, "score": score}
    outputs: Outputs = dict.fromkeys(("hidden", "dgate", "dx"), (gate.shape, gate.dtype))
    outputs |= {"dscore": (score.shape, mx.float32)}
    sizes = ("gate_shape[0]", f"gate_shape[1] / {_PIECE}")
    hidden, dgate, dx, dscore = by_lane("scored_swiglu", inputs, outputs, sizes, gate.shape[0] * _LANES, (_LANES,))()
    return hidden, dgate, dx, dscore


def serves(gate: mx.array, x: mx.array, d: mx.array) -> bool:
    """Whether `gradients` is to be used: the kernel covers these arrays, is faster, and was found right here."""
    alike = gate.shape == x.shape == d.shape and gate.dtype == x.dtype == d.dtype
    fits = gate.ndim == 2 and gate.dtype in BOUNDS and gate.shape[1] % _PIECE == 0 and gate.size >= LEAST
    return alike and fits and OPERATOR.serves(gate.dtype)


def with_mlx(
    activation: Callable[..., mx.array], inner: Sequence[mx.array], d: mx.array, score: mx.array
) -> tuple[mx.array, list[mx.array], mx.array]:
    """Return activation(*inner), the gradients of `inner`, and those of the scores, by MLX's operations.

    `inner` are [..., I], d is the gradient of score * activation(*inner) without that factor, and the score [..., 1].
    """
    weighted = d * score.astype(d.dtype)
    (hidden,), d_inner = mx.vjp(lambda *arrays: [activation(*arrays)], list(inner), [weighted])
    return hidden, d_inner, (wide(d) * hidden).sum(axis=-1)


def trial_case(dtype: mx.Dtype) -> Case[Device]:
    """Return the case of arrays of this dtype, in rows of fewer and of more pieces than lanes share one."""
    drawn = [random_arrays([((5, width), dtype)] * 3 + [((5,), mx.float32)]) for width in (40, 520)]

    def call() -> list[mx.array]:
        return [result for arrays in drawn for result in gradients(*arrays)]

    def plain(*drawn: Sequence[mx.array]) -> list[mx.array]:
        results: list[mx.array] = []
        for gate, x, d, score in drawn:
            hidden, inner, dscore = with_mlx(lambda gate, x: gate * mx.sigmoid(gate) * x, [gate, x], d, score[:, None])
            results += [hidden, *inner, dscore]
        return results

    names = [f"{name} of {arrays[0].shape[1]}" for arrays in drawn for name in ("hidden", "dgate", "dx", "dscore")]
    like = [array for arrays in drawn for array in arrays]
    return Case(
        name=f"experts' gradients of {dtype}",
        results=names,
        call=by_kernels(call),
        truth=lambda: in_float64(plain, *drawn),
        bound=BOUNDS[dtype],
        like=like,
    )


OPERATOR = KernelOperator("experts' gradients", trial_case)
