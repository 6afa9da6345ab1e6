"""LoRA on a linear per expert, plain or quantised.

Names and shapes as in mlx_lm.tuner.lora.LoRASwitchLinear: lora_a [E, r, in], lora_b [E, out, r]. Called by itself, the
adapter adds two gathered products to its base's, in the order of experts. Inside a SwitchGLU or SwitchMLP that
deltatune's patches serve, base and adapter are `projection(...)`, and ops.experts.expert_block runs all of the layer's
at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..machine import backend
from ..ops.experts import Projection
from .adapter import Adapter, uniform
from .weights import dense_weight, input_size, is_quantized, output_factor, takes_indices, with_weight

# From as many indices on as mlx-lm's own expert layers sort.
_SORTED_FROM = 64


class LoRASwitchLinear(Adapter):
    """y = linear(x, indices) + scale * dropout(x) A[e]^T B[e]^T, for the expert e that `indices` names.

    x is [rows, 1, in] with indices [rows] where `sorted_indices`, else broadcastable to indices [..., k] with two
    trailing axes [1, in]. Values of indices are not checked. ValueError for sorted indices and another number of rows.
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
        if sorted_indices:
            _check_sorted(x, indices)
        elif indices.size >= _SORTED_FROM or backend.device() == "cuda":
            # On CUDA, MLX's unsorted products read past their alignment for a rank that 4 or 8 does not divide.
            return _in_order(self, x, indices)
        update = self.dropout(x)
        for factor in (self.lora_a, self.lora_b):
            update = mx.gather_mm(update, factor.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=sorted_indices)
        return self.linear(x, indices, sorted_indices=sorted_indices) + (self.scale * update).astype(x.dtype)

    def fuse(self, dequantize: bool = False) -> nn.Module:
        base = dense_weight(self.linear)
        weight = base.astype(mx.float32) + (self.scale * self.lora_b) @ self.lora_a
        return with_weight(self.linear, weight.astype(base.dtype), PlainSwitchLinear, dequantize)


def _check_sorted(x: mx.array, indices: mx.array) -> None:
    """The gradient of MLX's sorted product reads as many rows as there are indices, past the end of fewer."""
    if math.prod(x.shape[:-2]) != indices.size:
        raise ValueError(
            f"sorted_indices: expected a row [1, {x.shape[-1]}] of x for each of the {indices.size} indices, got x "
            f"{list(x.shape)}: repeat the rows (x[order // k]), or leave sorted_indices False."
        )


def _in_order(linear: Callable[..., mx.array], x: mx.array, indices: mx.array) -> mx.array:
    """linear(x, indices) by rows in the order of experts: unsorted, the gradient holds a matrix a row."""
    lead = mx.broadcast_shapes(x.shape[:-2], indices.shape)
    rows = mx.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(-1, *x.shape[-2:])
    flat = mx.stop_gradient(mx.broadcast_to(indices, lead).reshape(-1))
    order = mx.argsort(flat)
    y = linear(rows[order], flat[order], sorted_indices=True)[mx.argsort(order)]
    return y.reshape(*lead, *y.shape[-2:])


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


def projection(module: nn.Module) -> Projection | None:
    """The arrays of a linear per expert, with the adapter around it (ours or mlx-lm's), for expert_block.

    None for a module of another kind, mlx-vlm's nvfp4 experts with a scale of their own among them. Draws a key where
    the adapter drops inputs in training.
    """
    adapter = None
    if "lora_a" in module and "lora_b" in module and "linear" in module and module["lora_a"].ndim == 3:
        adapter, module = module, module["linear"]
    # Read as from a dict: probe.py, which looks for owners that read weights themselves, must not count this.
    held: dict[str, Any] = {name: dict.get(module, name) for name in _STORED}
    weight = held["weight"]
    if weight is None or weight.ndim != 3 or not takes_indices(module):
        return None
    packed = held["scales"] is not None
    if packed:
        if not is_quantized(module) or output_factor(module) is not None:
            return None
        held |= {name: getattr(module, name) for name in ("group_size", "bits", "mode")}
    trains = [n for n in ("weight", "bias") if held[n] is not None and n not in module._no_grad and not packed]
    if adapter is not None:
        factors = ("lora_a", "lora_b")
        trains += [name for name in factors if name not in adapter._no_grad]
        held |= {name: adapter[name] for name in factors} | {"scale": adapter.scale} | _dropout(adapter)
    return Projection(**held, trains=tuple(trains))


_STORED = ("weight", "bias", "scales", "biases", "global_scale")


def _dropout(adapter: nn.Module) -> dict[str, Any]:
    rate = 1 - adapter.dropout._p_1
    if not adapter.dropout.training or rate == 0:
        return {}
    return {"dropout": rate, "key": mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)}
