"""Replaces activations and gated norms, which ops/pointwise/activations.py computes as is best on MLX's device.

Versions read: mlx 0.32.2 to 0.32.4; mlx-lm 0.32.0 to 0.32.2; mlx-vlm 0.7.0 and 0.7.10.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from ...ops.decoding import token_products
from ...ops.pointwise import activations
from ...ops.tracing import trace
from ..patch_record import Function, Patch
from ..small_cases import LENGTH, WIDTH, alike, drawn, layer_input, plain_norm, same_layer, serving
from ..whole_rows import decodes
from .mlx_lm import Convolution


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
_REASON = "its gradient keeps arrays that are cheap to compute again, and it passes over memory often"
_WITHOUT = "Training is slower then, or needs more memory; nothing else changes."
_RECORD: dict[str, Any] = {"reason": _REASON, "without": _WITHOUT}
_SWIGLU: dict[str, Any] = _RECORD | {"name": "swiglu", "replacement": _swiglu, "check": alike(layer_input, _other_rows)}
_GATED_NORM: dict[str, Any] = _RECORD | {
    "signature": "(self, hidden_states, gate=None)",
    "replacement": _gated_norm,
    "check": same_layer(layer_input, _other_rows, build=plain_norm(WIDTH), inside=serving),
}

PATCHES = (
    Patch(**_RECORD, module="mlx.nn.layers.activations", name="silu", replacement=_silu, check=IS_SILU),
    Patch(**_SWIGLU, module="mlx_lm.models.activations"),
    Patch(**_GATED_NORM, module="mlx_lm.models.qwen3_next", name="Qwen3NextRMSNormGated.__call__"),
    Patch(
        **_GATED_NORM | {"signature": "(self, x, gate)"},
        module="mlx_lm.models.olmo_hybrid",
        name="RMSNormGated.__call__",
    ),
)
# Those of mlx-vlm, which are not tried on NVIDIA GPUs.
OF_MLX_VLM = (
    Patch(**_SWIGLU, module="mlx_vlm.models.activations"),
    Patch(**_GATED_NORM, module="mlx_vlm.models.qwen3_5.language", name="Qwen3_5RMSNormGated.__call__"),
)
