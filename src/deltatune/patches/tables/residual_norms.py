"""Replaces RMS norms on GPUs, and the sums of the residual stream beside them on NVIDIA's.

MLX's gradient of a norm sums a gradient for the weight over all tokens, also where the weight is frozen, and a layer's
two sums pass over memory by themselves, forward and backward.

Versions read: mlx 0.32.2 to 0.32.4; mlx-lm 0.32.0 to 0.32.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...ops.decoding.token_products import normed, total
from ...ops.pointwise.weighted_norms import branch_norm, covers, serves, sum_norm, weighted_norm
from ...ops.recomputation import remember, remembered
from ...ops.tracing import trace
from ..patch_record import Check, Function, Patch
from ..small_cases import (
    WIDTH,
    answering,
    first_layer,
    layer_input,
    of_config,
    one_token,
    plain_norm,
    same_layer,
    serving,
)
from ..whole_rows import decodes

_SLOWER = "Training on an NVIDIA GPU is a little slower then; nothing else changes."


def _rms_norm(upstream: Function) -> Function:
    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        if x.ndim > 2 and decodes(x.shape[1]):
            return upstream(self, x)
        weight = self["weight"]
        eps = self.eps
        if serves(x, weight, eps):
            return normed(weighted_norm(x, weight, eps), x, weight, eps)
        # Adapters need not keep the result: they compute it from x, which its own gradient keeps.
        return remembered(lambda x: [mx.fast.rms_norm(x, weight, eps)], x)[0]

    return __call__


def _layer(mixer: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Build the replacement of a layer's __call__: x plus its output of `mixer`(layer), then plus the MLP of that."""

    def replacement(upstream: Function) -> Function:
        def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:  # noqa: N807
            if decodes(x.shape[1]):
                return upstream(self, x, mask, cache)
            first, second = norms = self.input_layernorm, self.post_attention_layernorm
            if not all(type(norm) is nn.RMSNorm and serves(x, norm["weight"], norm.eps) for norm in norms):
                return upstream(self, x, mask, cache)
            if trace.current().next_tokens:
                # Norms and sums go along with the products beside them.
                x = total(x, mixer(self)(first(x), mask, cache))
                return total(x, self.mlp(second(x)))
            x, of_x = branch_norm(x, first["weight"], first.eps)
            _remember(of_x, x, first)
            mixed = mixer(self)(of_x, mask, cache)
            if not covers(x, second["weight"], mixed):
                x = x + mixed
                return x + self.mlp(second(x))
            x, of_x = sum_norm(x, mixed, second["weight"], second.eps)
            _remember(of_x, x, second)
            return x + self.mlp(of_x)

        return __call__

    return replacement


def _remember(normed: mx.array, x: mx.array, norm: Any) -> None:
    weight = norm["weight"]
    eps = norm.eps
    remember([normed], lambda x: [weighted_norm(x, weight, eps)], x)


def _by_kind(layer: Any) -> Any:
    return layer.linear_attn if layer.is_linear else layer.self_attn


def _same(build: Any) -> Check:
    def check(upstream: Function, ours: Function) -> str | None:
        trained = same_layer(layer_input, build=build, inside=serving)(upstream, ours)
        return trained or same_layer(one_token, build=build, inside=answering, gradient=False)(upstream, ours)

    return check


def _layer_record(module: str, name: str, mixer: Callable[[Any], Any], build: Any = first_layer) -> Patch:
    return Patch(
        module=f"mlx_lm.models.{module}",
        name=f"{name}.__call__",
        reason="on an NVIDIA GPU its residual sums are passes over memory of their own, forward and backward",
        without=_SLOWER,
        replacement=_layer(mixer),
        check=_same(build),
    )


NORM = Patch(
    module="mlx.nn.layers.normalization",
    name="RMSNorm.__call__",
    reason="its result is kept, and an NVIDIA GPU sums its weight's gradient over all tokens, also of a frozen weight",
    without="Training needs more memory then, or takes longer; nothing else changes.",
    replacement=_rms_norm,
    check=same_layer(layer_input, build=plain_norm(WIDTH), inside=serving),
)
PATCHES = (
    NORM,
    _layer_record("qwen3_5", "DecoderLayer", _by_kind),
    _layer_record("qwen3_next", "Qwen3NextDecoderLayer", _by_kind),
    _layer_record("kimi_linear", "KimiDecoderLayer", lambda layer: layer.self_attn),
    _layer_record("bailing_moe_v3", "BailingDecoderLayer", lambda layer: layer.attention),
    _layer_record("olmo_hybrid", "LinearAttentionDecoderLayer", lambda layer: layer.linear_attn, of_config),
)
