"""Replaces MLX's attention where rows are trained or scored whole, and what tells such calls from a decoder's.

Every model of mlx-lm and mlx-vlm ends in mx.fast.scaled_dot_product_attention, whichever function of its package it
calls, so that one record reaches all of them. Versions read: mlx-lm 0.31.3, 0.32.0 to 0.32.2; mlx-vlm 0.5.0, 0.6.2,
0.6.4, 0.6.8, 0.6.12, 0.6.17, 0.7.0, 0.7.3, 0.7.6, 0.7.8, 0.7.10.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...ops.attention import attention_naive
from ..patch_record import Function, Patch, core_record, describe_difference
from ..whole_rows import attending, marking, remembering, serves, whole
from . import LOWEST_MLX_VLM

_REASON = "its backward pass keeps the matrix of all scores, which grows with the square of the length"
_UNMARKED = (
    "Gradients that are taken through it then keep MLX's own attention, whose memory grows with the square of the "
    "length."
)
_READ = "The mask of a window is then read as a matrix, which takes a byte for each pair of positions."


def _is_softmax_attention(upstream: Function, _ours: Function) -> str | None:
    """Compare the original with the definition on a few tokens, on the CPU, for which no kernel has to be built."""
    keys = mx.random.split(mx.random.key(0), 4)
    q = mx.random.normal((1, 4, 5, 8), key=keys[0])
    k, v = (mx.random.normal((1, 2, 5, 8), key=key) for key in keys[1:3])
    few, sinks = mx.array([True] * 4 + [False]), mx.random.normal((4,), key=keys[3])
    with mx.stream(mx.cpu):
        actual = [
            upstream(q, k, v, scale=0.3),
            upstream(q, k, v, scale=0.3, mask=few),
            upstream(q, k, v, scale=0.3, mask="causal", sinks=sinks),
        ]
        expected = [
            attention_naive(q, k, v, scale=0.3, causal=False),
            attention_naive(q, k, v, scale=0.3, causal=False, mask=few[None, None, None]),
            attention_naive(q, k, v, scale=0.3, sinks=sinks),
        ]
    return describe_difference(actual, expected, 1e-4, "the definition of attention")


def _differentiates_alike(upstream: Function, ours: Function) -> str | None:
    """Compare the gradient of a transform's function with the original's."""
    x = mx.array([0.5, 2.0])

    def gradient(transform: Function) -> mx.array:
        found = transform(lambda x: (x**3).sum())(x)
        return found[1] if isinstance(found, tuple) else found

    return describe_difference([gradient(ours)], [gradient(upstream)], 1e-6, "upstream's gradient")


def _vjp_alike(upstream: Function, ours: Function) -> str | None:
    x = mx.array([0.5, 2.0])
    actual, expected = (vjp(lambda x: [x**3], [x], [mx.ones(2)])[1] for vjp in (ours, upstream))
    return describe_difference(actual, expected, 1e-6, "upstream's gradient")


def _without_padding(upstream: Function) -> Function:
    """ensure_fused_sdpa of mlx-vlm, whose heads are padded to a size of MLX's kernels, and which is compiled.

    A compiled function keeps the attention that it was traced with, so it must not be traced in training.
    """

    def ensure_fused_sdpa(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any = None) -> mx.array:
        if not serves():
            return upstream(q, k, v, scale, mask)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    return ensure_fused_sdpa


def _in_one_piece(upstream: Function) -> Function:
    """chunked_attention of mlx-vlm, which cuts the queries into pieces for MLX's kernels, and is compiled as well."""

    def chunked_attention(
        queries: mx.array, keys: mx.array, values: mx.array, scale: float, chunk_size: int
    ) -> mx.array:
        if not serves():
            return upstream(queries, keys, values, scale, chunk_size)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)

    return chunked_attention


_MARK: dict[str, Any] = {
    "reason": "it says that a gradient is taken, so that deltatune serves the attention inside",
    "without": _UNMARKED,
}
_MASK: dict[str, Any] = {
    "name": "create_causal_mask",
    "signature": "(N, offset=0, window_size=None, right_padding=None, left_padding=None)",
    "holders": (),
    "reason": "deltatune's attention needs to know the window, and not the mask",
    "without": _READ,
    "replacement": remembering,
}
_TOWER: dict[str, Any] = {
    "package": "mlx_vlm",
    "versions": f">={LOWEST_MLX_VLM},<=0.7.10",
    "module": "mlx_vlm.models.base",
    "signature": "",
    "holders": (),
    "reason": "it is compiled, and would keep the attention that it is traced with",
    "without": "Vision towers that call it then train with MLX's own attention.",
}

PATCHES = (
    core_record(
        "fast.scaled_dot_product_attention", attending, _is_softmax_attention, reason=_REASON, without=_UNMARKED
    ),
    core_record("value_and_grad", marking, _differentiates_alike, **_MARK),
    core_record("grad", marking, _differentiates_alike, **_MARK),
    core_record("vjp", whole, _vjp_alike, **_MARK),
    Patch(**_MASK, package="mlx_lm", versions=">=0.31.3,<=0.32.2", module="mlx_lm.models.base"),
    # Earlier versions import mlx-lm's function.
    Patch(**_MASK, package="mlx_vlm", versions=">=0.6.4,<=0.7.10", settled="<0.6.4", module="mlx_vlm.models.cache"),
    Patch(**_TOWER, name="ensure_fused_sdpa", replacement=_without_padding),
    Patch(**_TOWER, name="chunked_attention", replacement=_in_one_piece),
    Patch(
        package="mlx_lm",
        versions=">=0.31.3,<=0.32.2",
        module="mlx_lm.tuner.trainer",
        name="evaluate",
        # Its defaults are functions, which have no fixed text.
        signature="",
        holders=("mlx_lm.lora",),
        reason="a validation has to fit into memory where the training does",
        without="Validation then holds the scores of all pairs of positions of one layer at a time.",
        replacement=whole,
    ),
)
