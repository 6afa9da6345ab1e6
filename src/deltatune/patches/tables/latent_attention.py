"""Replaces the latent attention (MLA) of three families in training: upstream's positional scores mask all pairs.

Upstream scores a query and a key in two parts: q . k of most channels in MLX's attention, and the product of the few
channels that carry positions as a mask of floats, [B, H, T, T]. In training both are one product here, of keys as long
as all channels together: 192 for values of 128, in the released models.

Versions read: mlx-lm 0.32.0 to 0.32.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..patch_record import Function, Patch
from ..small_cases import causal, layer_input, same_layer
from ..whole_rows import serves_attention, whole_rows


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


_RECORD: dict[str, Any] = {
    "reason": "a part of its scores is a mask of floats, whose gradient is a matrix of all pairs for each head",
    "check": same_layer(layer_input, causal, inside=whole_rows),
    "without": "Memory of these layers then grows with the square of the length.",
}

PATCHES = (
    Patch(
        **_RECORD,
        module="mlx_lm.models.kimi_linear",
        name="KimiMLAAttention.__call__",
        replacement=_training(_kimi_linear),
    ),
    Patch(
        **_RECORD, module="mlx_lm.models.kimi_k3", name="KimiK3MLAAttention.__call__", replacement=_training(_kimi_k3)
    ),
    Patch(
        **_RECORD, module="mlx_lm.models.bailing_moe_v3", name="BailingMLA.__call__", replacement=_training(_bailing)
    ),
)
