"""LoRA on the linear layers of a mixture of experts (a "switch linear" holds one matrix per expert).

Parameters are named and shaped as in mlx_lm.tuner.lora.LoRASwitchLinear: lora_a [E, r, in], lora_b [E, out, r]. In a
patched SwitchGLU or SwitchMLP the adapter is not called: `projection` hands its arrays and the base's to
ops.experts.expert_block, which computes gate, up and down of the layer together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..machine import backend
from ..ops.experts import Projection
from ..upstream import dropout_rate
from .adapter import Adapter, uniform
from .weights import dense_weight, frozen, input_size, is_quantized, output_factor, quantization, takes_indices

# The number of indices from which rows are sorted by expert: that of mlx-lm's layers, and on CUDA any, since MLX's
# unsorted products there read misaligned memory for a rank that is no multiple of 4 or 8.
_SORTED_FROM = {"cpu": 64, "metal": 64, "cuda": 0}
# The ranks that the kernels for experts take are multiples of this.
_RANKS = {"cpu": 1, "metal": 1, "cuda": 8}
# The arrays of a switch linear.
_ARRAY_NAMES = ("weight", "bias", "scales", "biases", "global_scale")


class PlainSwitchLinear(nn.Module):
    """The dense layer that a quantised one becomes when it is fused with `dequantize`.

    It holds weight [E, out, in] and, where the quantised layer has one, bias [E, out].
    """

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self["weight"].shape[0]

    @property
    def output_dims(self) -> int:
        """The size of an output row."""
        return self["weight"].shape[1]

    @property
    def input_dims(self) -> int:
        """The size of an input row."""
        return self["weight"].shape[2]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return weight[e] x + bias[e], with arguments as for LoRASwitchLinear."""
        weight = self["weight"].swapaxes(-1, -2)
        y = mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=sorted_indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


class LoRASwitchLinear(Adapter):
    """A linear layer per expert with a low-rank update each.

    Called with (x, indices), it returns linear(x, indices) + scale * dropout(x) A[e]^T B[e]^T for the expert e that
    `indices` names. x broadcasts to indices [..., k] followed by [1, in]. With `sorted_indices`, x is [rows, 1, in],
    indices are [rows] in ascending order, and another number of rows is a ValueError. Whether an index names an expert
    that exists is not checked.
    """

    base_name = "linear"
    dense_class = PlainSwitchLinear

    def begin(self, rank: int) -> None:
        experts, outputs = self.linear["weight"].shape[:2]
        inputs = input_size(self.linear)
        self.lora_a = uniform(inputs, (experts, rank, inputs))
        self.lora_b = mx.zeros((experts, outputs, rank))

    # mlx-lm and mlx-vlm read these three sizes of a switch linear, adapted or not.

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self.lora_a.shape[0]

    @property
    def input_dims(self) -> int:
        """The size of an input row."""
        return self.lora_a.shape[2]

    @property
    def output_dims(self) -> int:
        """The size of an output row."""
        return self.lora_b.shape[1]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if sorted_indices and math.prod(x.shape[:-2]) != indices.size:
            # The gradient of MLX's sorted product would read past the end of the rows.
            raise ValueError(
                f"sorted_indices: expected a row [1, {x.shape[-1]}] of x for each of the {indices.size} indices, got x "
                f"{list(x.shape)}: repeat the rows (x[order // k]), or leave sorted_indices False."
            )
        if not sorted_indices and indices.size >= backend.here(_SORTED_FROM):
            return _sorted_by_expert(self, x, indices)
        update = self.dropout(x)
        for factor in (self.lora_a, self.lora_b):
            update = mx.gather_mm(update, factor.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=sorted_indices)
        return self.linear(x, indices, sorted_indices=sorted_indices) + (self.scale * update).astype(x.dtype)

    def adapted_weight(self) -> mx.array:
        return dense_weight(self.linear).astype(mx.float32) + (self.scale * self.lora_b) @ self.lora_a


def _sorted_by_expert(linear: Callable[..., mx.array], x: mx.array, indices: mx.array) -> mx.array:
    """Return linear(x, indices), computed on rows sorted by expert.

    The gradient of MLX's unsorted product holds a copy of the expert's matrix for every row.
    """
    lead = mx.broadcast_shapes(x.shape[:-2], indices.shape)
    rows = mx.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(-1, *x.shape[-2:])
    flat = mx.stop_gradient(mx.broadcast_to(indices, lead).reshape(-1))
    order = mx.argsort(flat)
    y = linear(rows[order], flat[order], sorted_indices=True)[mx.argsort(order)]
    return y.reshape(*lead, *y.shape[-2:])


def projection(module: nn.Module) -> Projection | None:
    """Collect the arrays of a switch linear, and of an adapter around it (ours or mlx-lm's), for expert_block.

    An adapter with active dropout draws a random key. None for a module that expert_block cannot compute: one that is
    no switch linear, or one of mlx-vlm's nvfp4 layers, which scale their outputs.
    """
    adapter = None
    if "lora_a" in module and "lora_b" in module and "linear" in module and module["lora_a"].ndim == 3:
        adapter = module
        module = module["linear"]
    # dict.get: directly_read() watches module.get for owners that bypass an adapter, which this function does not.
    arrays: dict[str, Any] = {name: dict.get(module, name) for name in _ARRAY_NAMES}
    weight = arrays["weight"]
    if weight is None or weight.ndim != 3 or not takes_indices(module):
        return None
    packed = arrays["scales"] is not None
    settings: dict[str, Any] = {}
    if packed:
        if not is_quantized(module) or output_factor(module) is not None:
            return None
        settings |= quantization(module)
    still = frozen(module)
    trains = [n for n in ("weight", "bias") if arrays[n] is not None and n not in still and not packed]
    if adapter is not None:
        factors = ("lora_a", "lora_b")
        still = frozen(adapter)
        trains += [name for name in factors if name not in still]
        settings |= dict(zip(factors, _factors(adapter), strict=True)) | {"scale": adapter.scale}
        rate = dropout_rate(adapter.dropout) if adapter.dropout.training else 0.0
        if rate:
            settings |= {"dropout": rate, "key": mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)}
    return Projection(**arrays, **settings, trains=tuple(trains))


def _factors(adapter: nn.Module) -> tuple[mx.array, mx.array]:
    """Return A and B, on NVIDIA GPUs with zeros up to the next rank that the kernels there take."""
    a, b = adapter["lora_a"], adapter["lora_b"]
    missing = -a.shape[1] % backend.here(_RANKS)
    if not missing:
        return a, b
    return mx.pad(a, [(0, 0), (0, missing), (0, 0)]), mx.pad(b, [(0, 0), (0, 0), (0, missing)])
