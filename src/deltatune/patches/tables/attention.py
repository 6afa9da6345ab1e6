"""Replaces MLX's attention where rows are trained or scored whole, and functions that tell such calls from a decoder's.

Every model of mlx-lm and mlx-vlm ends in mx.fast.scaled_dot_product_attention, whichever function of its package it
calls, so that one record reaches all of them. Versions read: mlx-lm 0.32.0 to 0.32.2; mlx-vlm 0.7.0,
0.7.3, 0.7.6, 0.7.8, 0.7.10.

The latent attention (MLA) of three families scores a query and a key in two parts: q . k of most channels in MLX's
attention, and the product of the few channels that carry positions as a mask of floats, [B, H, T, T]. In training both
are one product here, of keys as long as all channels together: 192 for values of 128, in the released models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...ops.attention import attention_naive
from ..patch_record import PACKING, Check, Function, Patch
from ..small_cases import alike, causal, describe_difference, drawn, layer_input, results, same_layer
from ..whole_rows import attending, marking, remembering, serves_attention, whole, whole_rows

_UNMARKED = (
    "Gradients that are taken through it then keep MLX's own attention, whose memory grows with the square of the "
    "length."
)


def _is_softmax_attention(upstream: Function, _ours: Function) -> str | None:
    """Compare the original with the definition on a few tokens, on the CPU, for which no kernel has to be built."""
    arrays = [drawn(0, 1, 4, 5, 8), drawn(1, 1, 2, 5, 8), drawn(2, 1, 2, 5, 8), drawn(3, 4)]
    few = mx.array([True] * 4 + [False])

    def mlx(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array) -> list[mx.array]:
        return [
            upstream(q, k, v, scale=0.3),
            upstream(q, k, v, scale=0.3, mask=few),
            upstream(q, k, v, scale=0.3, mask="causal", sinks=sinks),
        ]

    def definition(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array) -> list[mx.array]:
        return [
            attention_naive(q, k, v, scale=0.3, causal=False),
            attention_naive(q, k, v, scale=0.3, causal=False, mask=few[None, None, None]),
            attention_naive(q, k, v, scale=0.3, sinks=sinks),
        ]

    with mx.stream(mx.cpu):
        return describe_difference(results(mlx, arrays), results(definition, arrays), 1e-4, "the definition")


def _gradient_alike(of: Any) -> Check:
    """Build a check that compares a transform's gradient: `of` returns that of x**3 by the transform."""

    def check(upstream: Function, ours: Function) -> str | None:
        x = mx.array([0.5, 2.0])
        return describe_difference([of(ours, x)], [of(upstream, x)], 1e-6, "upstream's gradient")

    return check


def _of_gradient(transform: Function, x: mx.array) -> mx.array:
    result = transform(lambda x: (x**3).sum())(x)
    return result[1] if isinstance(result, tuple) else result


def _of_vjp(vjp: Function, x: mx.array) -> mx.array:
    return vjp(lambda x: [x**3], [x], [mx.ones(2)])[1][0]


def _without_padding(upstream: Function) -> Function:
    """ensure_fused_sdpa of mlx-vlm, without its padding of heads to a size of MLX's kernels; upstream's is compiled.

    A compiled function keeps the attention that it was traced with, so it must not be traced in training.
    """

    def ensure_fused_sdpa(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any = None) -> mx.array:
        if not serves_attention():
            return upstream(q, k, v, scale, mask)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    return ensure_fused_sdpa


def _in_one_piece(upstream: Function) -> Function:
    """chunked_attention of mlx-vlm, which cuts the queries into pieces for MLX's kernels, and is compiled as well."""

    def chunked_attention(
        queries: mx.array, keys: mx.array, values: mx.array, scale: float, chunk_size: int
    ) -> mx.array:
        if not serves_attention():
            return upstream(queries, keys, values, scale, chunk_size)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)

    return chunked_attention


def _is_window(upstream: Function, ours: Function) -> str | None:
    """Compare the masks of both with the definition of a window."""
    at = mx.arange(6)
    with whole_rows():
        actual = [function(*arguments) for function in (upstream, ours) for arguments in ((6,), (6, 0, 3))]
    expected = [at[:, None] >= at, (at[:, None] >= at) & (at[:, None] < at + 3)]
    return describe_difference([mx.squeeze(m) for m in actual], 2 * expected, 1e-6, "a causal mask")


def _attends(*more: Any) -> Any:
    """Build a check of a function that takes q, k, v, the scale, and `more`."""
    arrays = [partial(drawn, seed, 1, 2, 5, 8) for seed in range(3)]

    def call(function: Function, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        with whole_rows():
            return function(q, k, v, 0.3, *more)

    definition = lambda q, k, v, scale, *_: attention_naive(q, k, v, scale=scale, causal=False)  # noqa: E731
    return alike(*arrays, call=call, definition=definition)


def _evaluates_alike(upstream: Function, ours: Function) -> str | None:
    def evaluated(function: Function) -> mx.array:
        def batches(**_: Any) -> Any:
            return iter([(2.0, 1), (5.0, 2)])

        def loss(_: Any, value: float, tokens: int) -> tuple[mx.array, mx.array]:
            return mx.array(value), mx.array(tokens)

        return mx.array(
            function(model=nn.Module(), dataset=[], batch_size=1, num_batches=-1, loss=loss, iterate_batches=batches)
        )

    return describe_difference([evaluated(ours)], [evaluated(upstream)], 1e-6, "upstream's")


def _with_mask_of_rows(upstream: Function) -> Function:
    """Gemma 2's attention, which scores [B, key heads, query heads of each, T, T], with a mask [B, 1, T, T]."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:  # noqa: N807
        if self.repeats > 1 and isinstance(mask, mx.array) and mask.ndim == 4:
            mask = mask[:, :, None]
        return upstream(self, x, mask, cache)

    return __call__


_GROUPED: dict[str, Any] = {
    "name": "Attention.__call__",
    "reason": "the mask of packed documents belongs to rows, and not to groups of heads",
    "without": "Gemma 2 then cannot train on packed documents in batches of several rows.",
    "needed_for": (PACKING,),
    "replacement": _with_mask_of_rows,
    "check": same_layer(layer_input, causal),
}
_MARK: dict[str, Any] = {
    "reason": "it says that a gradient is taken, so that deltatune serves the attention inside",
    "without": _UNMARKED,
}
_MASK: dict[str, Any] = {
    "name": "create_causal_mask",
    "reason": "deltatune's attention needs to know the window, and not the mask",
    "without": "The mask of a window is then read as a matrix, which takes a byte for each pair of positions.",
    "replacement": remembering,
    "check": _is_window,
}
_TOWER: dict[str, Any] = {
    "module": "mlx_vlm.models.base",
    "reason": "it is compiled, and would keep the attention that it is traced with",
    "without": "Vision towers that call it then train with MLX's own attention.",
}

PATCHES = (
    Patch(
        "mlx.core",
        "fast.scaled_dot_product_attention",
        attending,
        _is_softmax_attention,
        reason="its backward pass keeps the matrix of all scores, which grows with the square of the length",
        without=_UNMARKED,
    ),
    Patch("mlx.core", "value_and_grad", marking, _gradient_alike(_of_gradient), **_MARK),
    Patch("mlx.core", "grad", marking, _gradient_alike(_of_gradient), **_MARK),
    Patch("mlx.core", "vjp", whole, _gradient_alike(_of_vjp), **_MARK),
    Patch(**_MASK, module="mlx_lm.models.base"),
    Patch(**_MASK, module="mlx_vlm.models.cache"),
    Patch(**_TOWER, name="ensure_fused_sdpa", replacement=_without_padding, check=_attends(None)),
    Patch(**_TOWER, name="chunked_attention", replacement=_in_one_piece, check=_attends(2)),
    Patch(
        module="mlx_lm.tuner.trainer",
        name="evaluate",
        # Its defaults are functions, which have no fixed text.
        signature="",
        reason="a validation has to fit into memory where the training does",
        without="Validation then holds the scores of all pairs of positions of one layer at a time.",
        replacement=whole,
        check=_evaluates_alike,
    ),
    Patch(**_GROUPED, module="mlx_lm.models.gemma2"),
    Patch(**_GROUPED, module="mlx_vlm.models.gemma2.language"),
)


def _training(attended: Function) -> Callable[[Function], Function]:
    """Build the replacement of a __call__ that runs `attended(self, x, mask)` where deltatune serves attention."""

    def replacement(upstream: Function) -> Function:
        def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:  # noqa: N807
            # A single token has a form of its own, which is for decoding.
            if cache is not None or x.shape[1] == 1 or not serves_attention():
                return upstream(self, x, mask, cache)
            return attended(self, x, mask)

        return __call__

    return replacement


def _queries(self: Any, x: mx.array) -> mx.array:
    """The queries [B, T, H (N + R)]: N channels without positions, R with."""
    if self.q_lora_rank is None:
        return self.q_proj(x)
    return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


def _attend(self: Any, x: mx.array, q: mx.array, mask: Any, rotate: Callable[[mx.array], mx.array]) -> mx.array:
    """Attend with queries q [B, T, H (N + R)] of a layer's input x [B, T, D]; return [B, T, H, V].

    `rotate` puts positions into the R channels that carry them, [B, any, T, R].
    """
    q = mx.unflatten(q, -1, (self.num_heads, -1)).swapaxes(1, 2)
    q_plain, q_rotary = mx.split(q, [self.qk_nope_head_dim], axis=-1)
    latent, k_rotary = mx.split(self.kv_a_proj_with_mqa(x)[:, None], [self.kv_lora_rank], axis=-1)
    latent = self.kv_a_layernorm(latent)
    k_plain = self.embed_q(latent, transpose=False)
    v = self.unembed_out(latent)
    k_rotary = mx.broadcast_to(rotate(k_rotary), q_rotary.shape)
    k = mx.concatenate([k_plain, k_rotary], axis=-1)
    q = mx.concatenate([q_plain, rotate(q_rotary)], axis=-1)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask).swapaxes(1, 2)


def _unrotated(x: mx.array) -> mx.array:
    """Kimi's models put no positions into these channels."""
    return x


def _kimi_linear(self: Any, x: mx.array, mask: Any) -> mx.array:
    return self.o_proj(_attend(self, x, self.q_proj(x), mask, _unrotated).flatten(2))


def _kimi_k3(self: Any, x: mx.array, mask: Any) -> mx.array:
    y = _attend(self, x, _queries(self, x), mask, _unrotated).flatten(2)
    return self.o_proj(y * mx.sigmoid(self.g_proj(x)) if self.use_gate else y)


def _bailing(self: Any, x: mx.array, mask: Any) -> mx.array:
    y = _attend(self, x, _queries(self, x), mask, self.rope)
    gate = mx.sigmoid(self.g_proj(x).astype(mx.float32)).astype(y.dtype)
    return self.dense((y * gate[..., None]).flatten(2))


_LATENT: dict[str, Any] = {
    "reason": "a part of its scores is a mask of floats, whose gradient is a matrix of all pairs for each head",
    "check": same_layer(layer_input, causal, inside=whole_rows),
    "without": "Memory of these layers then grows with the square of the length.",
}

LATENT = tuple(
    Patch(**_LATENT, module=f"mlx_lm.models.{module}", name=f"{name}.__call__", replacement=_training(attended))
    for module, name, attended in (
        ("kimi_linear", "KimiMLAAttention", _kimi_linear),
        ("kimi_k3", "KimiK3MLAAttention", _kimi_k3),
        ("bailing_moe_v3", "BailingMLA", _bailing),
    )
)
