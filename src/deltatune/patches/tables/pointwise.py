"""Replaces activations, norms and the operations around attention, whose gradients keep cheap arrays.

On NVIDIA GPUs, where mx.compile fuses nothing, kernels read memory once. MLX's gradient of a norm sums a gradient for
the weight over all tokens, also where the weight is frozen, and a layer's two sums pass over memory by themselves.

Versions read: mlx 0.32.2 to 0.32.4; mlx-lm 0.32.0 to 0.32.2; mlx-vlm 0.7.0 and 0.7.10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from ...lora.linear import projected as token_projections
from ...lora.linear import token_output
from ...ops.decoding import gated_attention_token, token_products
from ...ops.decoding.gated_attention_token import GatedAttention, RowArrays
from ...ops.decoding.row_caches import AttentionRows
from ...ops.decoding.token_products import normed, total
from ...ops.pointwise import activations, heads
from ...ops.pointwise.passes import OPERATOR as PASSES
from ...ops.pointwise.weighted_norms import branch_norm, covers, serves, sum_norm, weighted_norm
from ...ops.recomputation import from_inputs, keeps_inputs_alone, remember, remembered
from ...ops.tracing import trace
from ..patch_record import Check, Function, Patch
from ..small_cases import (
    LENGTH,
    WIDTH,
    alike,
    answering,
    causal,
    drawn,
    first_layer,
    layer_input,
    of_config,
    one_token,
    plain_norm,
    same_layer,
    serving,
)
from ..whole_rows import decodes
from .mlx_lm import Convolution


def _linear(upstream: Function) -> Function:
    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        y = token_output(self, x) if trace.current().next_tokens else None
        return upstream(self, x) if y is None else y

    return __call__


def _attention(upstream: Function) -> Function:
    """Gated attention: kernels compute the operations around it, or the gradient recomputes them."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:  # noqa: N807
        if isinstance(cache, AttentionRows):
            y = _next_token(self, x, cache)
            return upstream(self, x, mask, cache) if y is None else y
        if cache is not None or not (PASSES.is_for_here or keeps_inputs_alone()):
            return upstream(self, x, mask, cache)
        both = mx.unflatten(self.q_proj(x), -1, (self.num_attention_heads, -1))
        of_kernels = _queries_and_gate(self, both)
        if of_kernels is None and not keeps_inputs_alone():
            return upstream(self, x, mask, cache)
        queries, gate = of_kernels or _split(self, both)
        keys, values = (
            mx.unflatten(projection(x), -1, (self.num_key_value_heads, -1)) for projection in (self.k_proj, self.v_proj)
        )
        attention = upstream.__globals__["scaled_dot_product_attention"]
        output = attention(queries, _keys(self, keys), values.swapaxes(1, 2), cache=None, scale=self.scale, mask=mask)
        if of_kernels is None:
            return self.o_proj(remembered(lambda *inputs: from_inputs(_gated, *inputs), output, gate)[0])
        times_gate = heads.times_gate if heads.serves_gate(output, gate) else lambda y, gate: y.swapaxes(1, 2) * gate
        return self.o_proj(remembered(lambda *inputs: [times_gate(*inputs).flatten(2)], output, gate)[0])

    return __call__


def _split(layer: Any, both: mx.array) -> tuple[mx.array, mx.array]:
    """Queries [B, H, T, W] and the gate [B, T, H, W] from their projection, by MLX's operations."""
    queries, gate = mx.split(both, 2, axis=-1)
    return layer.rope(layer.q_norm(queries).swapaxes(1, 2)), gate


def _gated(y: mx.array, gate: mx.array) -> list[mx.array]:
    """Rows [B, T, H W] of attention's output [B, H, T, W] times the sigmoid of the gate [B, T, H, W]."""
    return [y.swapaxes(1, 2).flatten(2) * mx.sigmoid(gate.flatten(2))]


def _next_token(layer: Any, x: mx.array, cache: AttentionRows) -> mx.array | None:
    """The layer's output for one token of each row [B, 1, D], by one kernel; None where upstream's code serves."""
    of_queries = layer.q_norm
    of_keys = layer.k_norm
    rotary = _rotary(layer.rope)
    if rotary is None or {type(of_queries), type(of_keys)} != {nn.RMSNorm}:
        return None
    keys, values = cache.handed
    _, key_heads, _, size = keys.shape
    numbers = layer.num_attention_heads, key_heads, size, of_queries.eps, of_keys.eps
    kind = GatedAttention(*numbers, *rotary, layer.scale)
    projected = token_projections((layer.q_proj, layer.k_proj, layer.v_proj), x)
    arrays = RowArrays(projected, of_queries["weight"], of_keys["weight"], keys, values, cache.offset)
    if not gated_attention_token.serves(kind, arrays):
        return None
    return layer.o_proj(gated_attention_token.gated_attention_token(kind, arrays))


def _queries_and_gate(layer: Any, both: mx.array) -> Sequence[mx.array] | None:
    """Queries [B, H, T, W] and the gate's sigmoid [B, T, H, W] from their projection; None if no kernel serves."""
    if type(layer.q_norm) is not nn.RMSNorm:
        return None
    weight = layer.q_norm["weight"]
    eps = layer.q_norm.eps
    rotary = _rotary(layer.rope)
    if rotary is None or not heads.serves(both, weight, eps, *rotary, gated=True):
        return None
    return heads.turned_heads(both, weight, eps, *rotary, gated=True)


def _keys(layer: Any, keys: mx.array) -> mx.array:
    """Keys [B, H, T, W] from their projection [B, T, H, W]."""
    norm = layer.k_norm
    rotary = _rotary(layer.rope)
    if rotary is not None and type(norm) is nn.RMSNorm:
        weight = norm["weight"]
        eps = norm.eps
        if heads.serves(keys, weight, eps, *rotary, gated=False):
            return heads.turned_heads(keys, weight, eps, *rotary, gated=False)[0]
    return cast(mx.array, layer.rope(norm(keys).swapaxes(1, 2)))


def _rotary(rope: Any) -> tuple[int, float] | None:
    """The rotary dimensions and the base of an embedding that the kernels compute, else None."""
    plain = type(rope) is nn.RoPE and not rope.traditional and rope.scale == 1
    return (rope.dims, rope.base) if plain else None


PATCHES = (
    Patch(
        module="mlx.nn.layers.linear",
        name="Linear.__call__",
        reason="on an NVIDIA GPU the launches around it take longer than the product when many prompts are answered",
        without="Answers to many prompts at once take longer on an NVIDIA GPU then; nothing else changes.",
        replacement=_linear,
        check=same_layer(one_token, build=lambda cls: cls(WIDTH, 6, bias=False), inside=answering, gradient=False),
    ),
)
ATTENTION = Patch(
    module="mlx_lm.models.qwen3_next",
    name="Qwen3NextAttention.__call__",
    reason="its gradient keeps arrays that are cheap to compute again, and NVIDIA GPUs pass over memory often",
    without="Training needs more memory then, and an NVIDIA GPU takes longer; nothing else changes.",
    replacement=_attention,
    check=same_layer(layer_input, causal, inside=serving),
)


def _silu(upstream: Function) -> Function:
    """nn.silu of a convolution's output. Elsewhere mlx-lm calls it inside functions that are compiled for any shape."""

    def silu(x: mx.array) -> mx.array:
        last = trace.current().known.take(x, Convolution)
        if last is None:
            return upstream(x)
        return activations.silu_of_convolution(x, last.x, last.weight, last.segments, upstream)

    return silu


def _swiglu(upstream: Function) -> Function:
    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        decoding = gate.ndim == 3 and decodes(gate.shape[1])
        of_products = None if decoding else token_products.swiglu(gate, x)
        return activations.swiglu(gate, x, upstream, decoding=decoding) if of_products is None else of_products

    return swiglu


def _gated_norm(upstream: Function) -> Function:
    def __call__(self: Any, x: mx.array, gate: mx.array | None = None) -> mx.array:  # noqa: N807
        if gate is None:
            return upstream(self, x, gate)
        eps = self.eps

        def plain(gate: mx.array, x: mx.array, weight: mx.array) -> mx.array:
            return upstream(_NormArrays(weight, eps), x, gate)

        return activations.gated_norm(x, self.weight, gate, eps, plain, decoding=decodes(x.shape[1]))

    return __call__


class _NormArrays(NamedTuple):
    """The attributes that a gated norm of any package reads."""

    weight: mx.array
    eps: float


def _other_rows() -> mx.array:
    return drawn(1, 1, LENGTH, WIDTH)


# Without a convolution before it, MLX's own function serves.
IS_SILU = alike(layer_input, definition=lambda x: x * mx.sigmoid(x))
_CHEAP: dict[str, Any] = {
    "reason": "its gradient keeps arrays that are cheap to compute again, and it passes over memory often",
    "without": "Training is slower then, or needs more memory; nothing else changes.",
}
_SWIGLU: dict[str, Any] = _CHEAP | {"name": "swiglu", "replacement": _swiglu, "check": alike(layer_input, _other_rows)}
_GATED_NORM: dict[str, Any] = _CHEAP | {
    "signature": "(self, hidden_states, gate=None)",
    "replacement": _gated_norm,
    "check": same_layer(layer_input, _other_rows, build=plain_norm(WIDTH), inside=serving),
}

ACTIVATIONS = (
    Patch(**_CHEAP, module="mlx.nn.layers.activations", name="silu", replacement=_silu, check=IS_SILU),
    Patch(**_SWIGLU, module="mlx_lm.models.activations"),
    Patch(**_GATED_NORM, module="mlx_lm.models.qwen3_next", name="Qwen3NextRMSNormGated.__call__"),
    Patch(
        **_GATED_NORM | {"signature": "(self, x, gate)"},
        module="mlx_lm.models.olmo_hybrid",
        name="RMSNormGated.__call__",
    ),
)
# Those of mlx-vlm, which are not tried on NVIDIA GPUs.
ACTIVATIONS_OF_MLX_VLM = (
    Patch(**_SWIGLU, module="mlx_vlm.models.activations"),
    Patch(**_GATED_NORM, module="mlx_vlm.models.qwen3_5.language", name="Qwen3_5RMSNormGated.__call__"),
)


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
NORMS = (
    NORM,
    _layer_record("qwen3_5", "DecoderLayer", _by_kind),
    _layer_record("qwen3_next", "Qwen3NextDecoderLayer", _by_kind),
    _layer_record("kimi_linear", "KimiDecoderLayer", lambda layer: layer.self_attn),
    _layer_record("bailing_moe_v3", "BailingDecoderLayer", lambda layer: layer.attention),
    _layer_record("olmo_hybrid", "LinearAttentionDecoderLayer", lambda layer: layer.linear_attn, of_config),
)
