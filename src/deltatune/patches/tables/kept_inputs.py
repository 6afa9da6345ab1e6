"""Lets cheap operators of a layer keep their inputs alone for the backward pass, on Apple GPUs.

MLX's gradient of an activation, a gated norm or a convolution keeps every array between the inputs and the result. The
functions here compute these arrays again (ops/recomputation.py). On NVIDIA GPUs kernels do so (pointwise.py), and on a
CPU it takes more time than it is worth.

Versions read: mlx 0.32.2 to 0.32.4; mlx-lm 0.32.0 to 0.32.2; mlx-vlm 0.7.0 and 0.7.10.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from ...ops.causal_conv import joined_conv
from ...ops.recomputation import from_inputs, keeps_inputs_alone, remembered
from ..last_convolution import taken
from ..patch_record import Function, Patch
from ..small_cases import WIDTH, layer_input, plain_norm, same_layer, serving
from ..whole_rows import decodes
from .pointwise import IS_ATTENTION, IS_GATED_NORM, IS_SILU, IS_SWIGLU


def _swiglu(upstream: Function) -> Function:
    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        if gate.ndim == 3 and decodes(gate.shape[1]):
            return upstream(gate, x)

        def activated(*inputs: mx.array) -> list[mx.array]:
            return [upstream(*inputs)]

        return remembered(lambda *inputs: from_inputs(activated, *inputs), gate, x)[0]

    return swiglu


def _silu(upstream: Function) -> Function:
    """nn.silu that keeps the input of a convolution before it, from which the convolution is computed again too."""

    def silu(x: mx.array) -> mx.array:
        last = taken(x)
        if last is None:
            return upstream(x)
        segments = last.segments

        def convolved(x: mx.array, weight: mx.array) -> list[mx.array]:
            return [upstream(joined_conv(x, weight, segments))]

        return from_inputs(convolved, last.x, last.weight)[0]

    return silu


def _gated_norm(upstream: Function) -> Function:
    def __call__(self: Any, x: mx.array, gate: mx.array | None = None) -> mx.array:  # noqa: N807
        if gate is None or decodes(x.shape[1]):
            return upstream(self, x, gate)
        eps = self.eps

        def normed(gate: mx.array, x: mx.array, weight: mx.array) -> list[mx.array]:
            return [upstream(_NormArrays(weight, eps), x, gate)]

        # MLX adds up gradients in the order of the arguments, which is upstream's.
        return from_inputs(normed, gate, x, self.weight)[0]

    return __call__


class _NormArrays(NamedTuple):
    """What a gated norm of any package reads of itself."""

    weight: mx.array
    eps: float


def _rms_norm(upstream: Function) -> Function:
    """nn.RMSNorm whose result adapters need not keep: they compute it from x, which its own gradient keeps."""

    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        if x.ndim > 2 and decodes(x.shape[1]):
            return upstream(self, x)
        weight, eps = self["weight"], self.eps
        return remembered(lambda x: [mx.fast.rms_norm(x, weight, eps)], x)[0]

    return __call__


def _attention(upstream: Function) -> Function:
    """Attention whose output is multiplied by the sigmoid of a gate that comes with the queries."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:  # noqa: N807
        if cache is not None or not keeps_inputs_alone():
            return upstream(self, x, mask, cache)
        queries, gate = mx.split(mx.unflatten(self.q_proj(x), -1, (self.num_attention_heads, -1)), 2, axis=-1)
        keys, values = (
            mx.unflatten(projection(x), -1, (self.num_key_value_heads, -1)) for projection in (self.k_proj, self.v_proj)
        )
        queries = self.rope(self.q_norm(queries).swapaxes(1, 2))
        keys = self.rope(self.k_norm(keys).swapaxes(1, 2))
        attention = upstream.__globals__["scaled_dot_product_attention"]
        output = attention(queries, keys, values.swapaxes(1, 2), cache=None, scale=self.scale, mask=mask)
        return self.o_proj(remembered(lambda *inputs: from_inputs(_gated, *inputs), output, gate)[0])

    return __call__


def _gated(y: mx.array, gate: mx.array) -> list[mx.array]:
    """Rows [B, T, H W] of attention's output [B, H, T, W] times the sigmoid of the gate [B, T, H, W]."""
    return [y.swapaxes(1, 2).flatten(2) * mx.sigmoid(gate.flatten(2))]


_RECORD: dict[str, Any] = {
    "holders": (),
    "reason": "its gradient keeps arrays that are cheap to compute again",
    "without": "Training needs more memory then; nothing else changes.",
}
_OF_MLX: dict[str, Any] = {"package": "mlx", **_RECORD}
_OF_MLX_VLM: dict[str, Any] = {"package": "mlx_vlm", **_RECORD}
_OF_MLX_LM: dict[str, Any] = {"package": "mlx_lm", **_RECORD}

PATCHES = (
    Patch(**_OF_MLX, module="mlx.nn.layers.activations", name="silu", signature="", replacement=_silu, check=IS_SILU),
    Patch(
        **_OF_MLX,
        module="mlx.nn.layers.normalization",
        name="RMSNorm.__call__",
        signature="(self, x)",
        replacement=_rms_norm,
        check=same_layer(layer_input, build=plain_norm(WIDTH), inside=serving),
    ),
    Patch(
        **_OF_MLX_LM,
        module="mlx_lm.models.activations",
        name="swiglu",
        signature="",
        replacement=_swiglu,
        check=IS_SWIGLU,
    ),
    Patch(
        **_OF_MLX_LM,
        module="mlx_lm.models.qwen3_next",
        name="Qwen3NextRMSNormGated.__call__",
        signature="(self, hidden_states, gate=None)",
        replacement=_gated_norm,
        check=IS_GATED_NORM,
    ),
    Patch(
        **_OF_MLX_LM,
        module="mlx_lm.models.olmo_hybrid",
        name="RMSNormGated.__call__",
        signature="(self, x, gate)",
        replacement=_gated_norm,
        check=IS_GATED_NORM,
    ),
    Patch(
        **_OF_MLX_VLM,
        module="mlx_vlm.models.qwen3_5.language",
        name="Qwen3_5RMSNormGated.__call__",
        signature="(self, hidden_states, gate=None)",
        replacement=_gated_norm,
        check=IS_GATED_NORM,
    ),
    Patch(
        **_OF_MLX_VLM,
        module="mlx_vlm.models.activations",
        name="swiglu",
        signature="",
        replacement=_swiglu,
        check=IS_SWIGLU,
    ),
    Patch(
        **_OF_MLX_LM,
        module="mlx_lm.models.qwen3_next",
        name="Qwen3NextAttention.__call__",
        signature="(self, x, mask=None, cache=None)",
        replacement=_attention,
        check=IS_ATTENTION,
    ),
)
