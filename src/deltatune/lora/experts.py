"""LoRA on a linear per expert, plain or quantised.

Names and shapes as in mlx_lm.tuner.lora.LoRASwitchLinear: lora_a [E, r, in], lora_b [E, out, r]. On a CPU the gathered
products of a plain bf16 or fp16 base are not implemented in MLX: train such a model in fp32 there, or quantised.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .adapter import Adapter, uniform
from .weights import dense_weight, input_size, with_weight


class LoRASwitchLinear(Adapter):
    """y = linear(x, indices) + scale * dropout(x) A[e]^T B[e]^T, for the expert e that `indices` names.

    x is [rows, 1, in] with indices [rows] where `sorted_indices`, else broadcastable to indices [..., k] with two
    trailing axes [1, in].
    """

    base_name = "linear"
    kind = "lora"

    def __init__(self, linear: nn.Module, rank: int = 8, scale: float = 20.0, dropout: float = 0.0):
        super().__init__(linear, scale, dropout)
        experts, outputs = linear["weight"].shape[:2]
        inputs = input_size(linear)
        self.lora_a = uniform(inputs, (experts, rank, inputs))
        self.lora_b = mx.zeros((experts, outputs, rank))

    @property
    def rank(self) -> int:
        return self.lora_a.shape[1]

    @property
    def num_experts(self) -> int:
        """How many experts there are: read by owners of expert layers, as of the base."""
        return self.lora_a.shape[0]

    @property
    def input_dims(self) -> int:
        """Size of an input row."""
        return self.lora_a.shape[2]

    @property
    def output_dims(self) -> int:
        """Size of an output row."""
        return self.lora_b.shape[1]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        update = self.dropout(x)
        for factor in (self.lora_a, self.lora_b):
            update = mx.gather_mm(update, factor.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=sorted_indices)
        return self.linear(x, indices, sorted_indices=sorted_indices) + (self.scale * update).astype(x.dtype)

    def fuse(self, dequantize: bool = False) -> nn.Module:
        base = dense_weight(self.linear)
        weight = base.astype(mx.float32) + (self.scale * self.lora_b) @ self.lora_a
        return with_weight(self.linear, weight.astype(base.dtype), PlainSwitchLinear, dequantize)


class PlainSwitchLinear(nn.Module):
    """What a quantised expert layer becomes when fused without packing: weight [E, out, in], bias [E, out] or none."""

    @property
    def num_experts(self) -> int:
        """How many experts there are."""
        return self["weight"].shape[0]

    @property
    def output_dims(self) -> int:
        """Size of an output row."""
        return self["weight"].shape[1]

    @property
    def input_dims(self) -> int:
        """Size of an input row."""
        return self["weight"].shape[2]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x as for LoRASwitchLinear."""
        weight = self["weight"].swapaxes(-1, -2)
        y = mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=sorted_indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y
