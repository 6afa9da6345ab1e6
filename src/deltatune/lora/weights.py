"""The weight of a linear, expert or embedding module, whatever its storage: its true sizes, its values, a new one.

Modules are told apart by structure, so that mlx-lm's and mlx-vlm's own expert classes are served without naming them.
"""

from __future__ import annotations

import copy
import inspect

import mlx.core as mx
import mlx.nn as nn

from ..ops.quantized_product import unpacked

# What packed storage spends on one row of scales; the modes other than affine allow one (bits, group size) each.
_QUANTISED_KEYS = ("group_size", "bits", "mode")
# mlx-vlm's nvfp4 modules multiply their outputs by the one array, or divide them by the other: [], [E] or [E, out].
OUTPUT_SCALES = _MULTIPLIES, _DIVIDES = ("weight_scale_2", "weight_global_scale")


def is_quantized(module: nn.Module) -> bool:
    """Whether the module holds packed weights with scales (QuantizedLinear, QuantizedEmbedding, quantised experts)."""
    return "scales" in module and all(hasattr(module, key) for key in _QUANTISED_KEYS)


def is_switch(module: nn.Module) -> bool:
    """Whether the module is a linear per expert: a weight [E, out, in], called as module(x, indices, ...)."""
    return "weight" in module and module["weight"].ndim == 3 and takes_indices(module)


def takes_indices(module: nn.Module) -> bool:
    """Whether the module is called as module(x, indices, ...)."""
    return "indices" in inspect.signature(type(module).__call__).parameters


def input_size(module: nn.Module) -> int:
    """Columns of the weight before packing: right for 3, 5 and 6 bits too, where 32 // bits is not."""
    if is_quantized(module):
        return module["scales"].shape[-1] * module.group_size
    return module["weight"].shape[-1]


def output_factor(module: nn.Module) -> mx.array | None:
    """What a packed module multiplies its outputs with after the product: [], [E, 1, 1] or [E, out, 1]; else None."""
    name = next((name for name in OUTPUT_SCALES if name in module), None)
    if name is None:
        return None
    scale = module[name].astype(mx.float32)
    scale = scale.reshape(()) if scale.size == 1 else scale.reshape(*module["weight"].shape[:-2], -1, 1)
    return scale if name == _MULTIPLIES else 1 / scale


def dense_weight(module: nn.Module) -> mx.array:
    """The weight [..., out, in], dequantised where packed."""
    if not is_quantized(module):
        return module["weight"]
    settings = {key: getattr(module, key) for key in _QUANTISED_KEYS}
    weight = unpacked(module["weight"], module["scales"], module.get("biases"), module.get("global_scale"), **settings)
    factor = output_factor(module)
    return weight if factor is None else (weight * factor).astype(weight.dtype)


def with_weight(module: nn.Module, weight: mx.array, dense_class: type[nn.Module], dequantize: bool) -> nn.Module:
    """A copy of `module` holding `weight` [..., out, in]: packed as the module is, or plain where `dequantize`.

    `dense_class` is the plain class that stands for a packed module; the bias is shared with the original.
    """
    if is_quantized(module) and not dequantize:
        return _packed(module, weight)
    if is_quantized(module):
        plain = dense_class.__new__(dense_class)
        nn.Module.__init__(plain)
        if "bias" in module:
            plain.bias = module["bias"]
        plain.train(module.training)
    else:
        plain = _clone(module)
    plain.weight = weight
    return plain


def _packed(module: nn.Module, weight: mx.array) -> nn.Module:
    settings = {key: getattr(module, key) for key in _QUANTISED_KEYS}
    packed = _clone(module)
    if module.get("global_scale") is None:
        factor = output_factor(module)
        weight = weight if factor is None else (weight / factor).astype(weight.dtype)
        packed.weight, packed.scales, *biases = mx.quantize(weight, **settings)
        if biases:
            packed.biases = biases[0]
        return packed
    largest = mx.max(mx.abs(weight), axis=(-2, -1)).astype(mx.float32)
    rows = [mx.quantize(weight[e], global_scale=largest[e], **settings) for e in range(weight.shape[0])]
    packed.weight, packed.scales = (mx.stack(list(part)) for part in zip(*rows, strict=True))
    packed.global_scale = largest
    return packed


def _clone(module: nn.Module) -> nn.Module:
    clone = copy.copy(module)
    clone._no_grad = set(module._no_grad)
    return clone
