"""Reads and replaces the weight of a linear, switch-linear or embedding module, dense or quantised.

Modules are recognised by the arrays and settings they hold, so that mlx-lm's and mlx-vlm's classes need no list here.
"""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.products.quantized_product import unpacked

# The attributes of a quantised module that MLX's functions take as arguments of the same names.
_QUANTISATION_SETTINGS = ("group_size", "bits", "mode")
# The group size and bits that MLX takes where they are None (mlx/ops.cpp, quantization_params_from_mode).
_MODE_DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
# mlx-vlm's nvfp4 modules multiply their outputs by the first array, or divide them by the second: [], [E] or [E, out].
OUTPUT_SCALES = _MULTIPLIER, _DIVISOR = ("weight_scale_2", "weight_global_scale")


def is_quantized(module: nn.Module) -> bool:
    """Whether the module holds a quantised weight (QuantizedLinear, QuantizedEmbedding, quantised experts)."""
    return "scales" in module and all(hasattr(module, key) for key in _QUANTISATION_SETTINGS)


def quantization(module: nn.Module) -> dict[str, Any]:
    """Return the group size, bits and mode of a quantised module, as arguments of MLX's functions.

    A module of quantised experts may hold None, for MLX's default: mlx_lm.convert's mixed recipes write
    `"group_size": null`.
    """
    group_size, bits = _MODE_DEFAULTS.get(module.mode, (None, None))
    return {"group_size": module.group_size or group_size, "bits": module.bits or bits, "mode": module.mode}


def is_switch(module: nn.Module) -> bool:
    """Whether the module is a linear layer per expert: it holds a weight [E, out, in] and takes (x, indices, ...)."""
    return "weight" in module and module["weight"].ndim == 3 and takes_indices(module)


def takes_indices(module: nn.Module) -> bool:
    """Whether the module is called as module(x, indices, ...)."""
    return "indices" in inspect.signature(type(module).__call__).parameters


def input_size(module: nn.Module) -> int:
    """The number of inputs of a linear or switch-linear module, at any bit width."""
    # The packed weight's width times 32 // bits would be wrong for 3, 5 and 6 bits.
    if is_quantized(module):
        return module["scales"].shape[-1] * quantization(module)["group_size"]
    return module["weight"].shape[-1]


def output_factor(module: nn.Module) -> mx.array | None:
    """Return the factor that an nvfp4 module of mlx-vlm applies to its outputs, or None for any other module.

    The factor has shape [], [E, 1, 1] or [E, out, 1], so that it can multiply the weight as well.
    """
    name = next((name for name in OUTPUT_SCALES if name in module), None)
    if name is None:
        return None
    scale = module[name].astype(mx.float32)
    scale = scale.reshape(()) if scale.size == 1 else scale.reshape(*module["weight"].shape[:-2], -1, 1)
    return scale if name == _MULTIPLIER else 1 / scale


def dense_weight(module: nn.Module) -> mx.array:
    """Return the module's weight [..., out, in], dequantised where it is quantised."""
    if not is_quantized(module):
        return module["weight"]
    settings = quantization(module)
    weight = unpacked(module["weight"], module["scales"], module.get("biases"), module.get("global_scale"), **settings)
    factor = output_factor(module)
    return weight if factor is None else (weight * factor).astype(weight.dtype)


def dense_rows(module: nn.Module, start: int = 0, stop: int | None = None) -> mx.array:
    """Return the rows from `start` to `stop` of a weight [rows, columns], dequantised where it is quantised."""
    part = _copy(module)
    for name in ("weight", "scales", "biases"):
        if module.get(name) is not None:
            part[name] = module[name][start:stop]
    return dense_weight(part)


def with_weight(module: nn.Module, weight: mx.array, dense_class: type[nn.Module], dequantize: bool) -> nn.Module:
    """Return a copy of a linear, switch-linear or embedding module with another dense weight; they share the bias.

    A quantised module's copy is quantised with its settings, or with `dequantize` is dense, of `dense_class`.
    """
    if is_quantized(module) and not dequantize:
        return _with_quantized_weight(module, weight)
    if is_quantized(module):
        dense = dense_class.__new__(dense_class)
        nn.Module.__init__(dense)
        if "bias" in module:
            dense.bias = module["bias"]
        dense.train(module.training)
    else:
        dense = _copy(module)
    dense.weight = weight
    return dense


def _with_quantized_weight(module: nn.Module, weight: mx.array) -> nn.Module:
    settings = quantization(module)
    copied = _copy(module)
    if module.get("global_scale") is None:
        factor = output_factor(module)
        weight = weight if factor is None else (weight / factor).astype(weight.dtype)
        copied.weight, copied.scales, *biases = mx.quantize(weight, **settings)
        if biases:
            copied.biases = biases[0]
        return copied
    # mx.quantize takes one global scale, so each expert's matrix is quantised by itself.
    largest = mx.max(mx.abs(weight), axis=(-2, -1)).astype(mx.float32)
    matrices = [mx.quantize(weight[e], global_scale=largest[e], **settings) for e in range(weight.shape[0])]
    copied.weight, copied.scales = (mx.stack(list(part)) for part in zip(*matrices, strict=True))
    copied.global_scale = largest
    return copied


def frozen(module: nn.Module) -> list[str]:
    """Return the names of a module's own arrays that do not train."""
    trained = module.trainable_parameters()
    return [name for name, value in module.items() if isinstance(value, mx.array) and name not in trained]


def _copy(module: nn.Module) -> nn.Module:
    # copy.copy would share the set of frozen parameters, so that unfreezing the copy would unfreeze the original.
    copied: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(copied)
    # MLX's own attributes of every module: its mode, and which of its parameters are frozen.
    set_by_mlx = set(vars(copied))
    vars(copied).update({name: value for name, value in vars(module).items() if name not in set_by_mlx})
    dict.update(copied, module)
    copied.train(module.training)
    copied.freeze(recurse=False, keys=frozen(module))
    return copied
