"""Replaces activations on CPUs on which MLX takes exponentials one at a time (ops/pointwise/exponentials.py).

Versions read: mlx 0.32.2 to 0.32.4; mlx-lm 0.32.0 to 0.32.2; mlx-vlm 0.7.0 and 0.7.10.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...ops.pointwise import exponentials
from ...upstream import GELU_KIND
from ..last_convolution import taken
from ..patch_record import Function, Patch
from ..small_cases import layer_input, same_layer, serving
from ..whole_rows import decodes
from .pointwise import IS_GATED_NORM, IS_SILU, IS_SWIGLU

# A decoder takes no gradient, which would take exponentials again, so that smaller arrays gain nothing.
_FEWEST_IN_DECODING = 2**14


def _silu(upstream: Function) -> Function:
    """nn.silu of a convolution's output. Elsewhere mlx-lm calls it inside functions that are compiled for any shape."""

    def silu(x: mx.array) -> mx.array:
        return exponentials.silu(x) if taken(x) is not None and exponentials.serves(x) else upstream(x)

    return silu


def _swiglu(upstream: Function) -> Function:
    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        if gate.ndim == 3 and gate.size < _FEWEST_IN_DECODING and decodes(gate.shape[1]):
            return upstream(gate, x)
        serves = gate.shape == x.shape and exponentials.serves(gate, x)
        return exponentials.swiglu(gate, x) if serves else upstream(gate, x)

    return swiglu


def _gated_norm(upstream: Function) -> Function:
    def __call__(self: Any, x: mx.array, gate: mx.array | None = None) -> mx.array:  # noqa: N807
        if gate is None or not exponentials.large_enough(x) or gate.shape != x.shape:
            return upstream(self, x, gate)
        if not exponentials.serves(x, gate, self.weight):
            return upstream(self, x, gate)
        return exponentials.swiglu(gate, mx.fast.rms_norm(x, self.weight, self.eps))

    return __call__


def _mlp(_upstream: Function) -> Function:
    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        # Upstream's own code would call gate_proj once more, whose adapter would draw its dropout twice.
        gate, up = self.gate_proj(x), self.up_proj(x)
        serves = exponentials.serves(gate, up)
        return self.down_proj(exponentials.swiglu(gate, up) if serves else nn.silu(gate) * up)

    return __call__


def _gelu(upstream: Function) -> Function:
    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        if getattr(self, GELU_KIND, None) in ("precise", "tanh") and exponentials.serves(x):
            return exponentials.gelu_tanh(x)
        return upstream(self, x)

    return __call__


_RECORD: dict[str, Any] = {
    "holders": (),
    "reason": "on a CPU that is not Apple's it takes exponentials one at a time, in five times the time",
    "without": "Training on this CPU is slower then; nothing else changes.",
}
_OF_MLX: dict[str, Any] = {"package": "mlx", **_RECORD}
_OF_MLX_VLM: dict[str, Any] = {"package": "mlx_vlm", **_RECORD}
_OF_MLX_LM: dict[str, Any] = {"package": "mlx_lm", **_RECORD}
_ACTIVATION: dict[str, Any] = {"name": "swiglu", "signature": "", "replacement": _swiglu, "check": IS_SWIGLU}
_GATED_NORM: dict[str, Any] = {"replacement": _gated_norm, "check": IS_GATED_NORM}

PATCHES = (
    Patch(**_OF_MLX, module="mlx.nn.layers.activations", name="silu", signature="", replacement=_silu, check=IS_SILU),
    Patch(
        **_OF_MLX,
        module="mlx.nn.layers.activations",
        name="GELU.__call__",
        signature="(self, x)",
        replacement=_gelu,
        check=same_layer(layer_input, build=lambda cls: cls("tanh"), inside=serving),
    ),
    Patch(**_OF_MLX_LM, **_ACTIVATION, module="mlx_lm.models.activations"),
    Patch(**_OF_MLX_VLM, **_ACTIVATION, module="mlx_vlm.models.activations"),
    Patch(
        **_OF_MLX_LM,
        **_GATED_NORM,
        module="mlx_lm.models.qwen3_next",
        name="Qwen3NextRMSNormGated.__call__",
        signature="(self, hidden_states, gate=None)",
    ),
    Patch(
        **_OF_MLX_LM,
        **_GATED_NORM,
        module="mlx_lm.models.olmo_hybrid",
        name="RMSNormGated.__call__",
        signature="(self, x, gate)",
    ),
    Patch(
        **_OF_MLX_VLM,
        **_GATED_NORM,
        module="mlx_vlm.models.qwen3_5.language",
        name="Qwen3_5RMSNormGated.__call__",
        signature="(self, hidden_states, gate=None)",
    ),
    Patch(
        **_OF_MLX_LM,
        module="mlx_lm.models.olmo_hybrid",
        name="MLP.__call__",
        signature="(self, x)",
        replacement=_mlp,
        check=same_layer(layer_input, inside=serving),
    ),
)
