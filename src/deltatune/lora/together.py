"""Computes the adapters that read one input together, in a traced training step (ops/products/adapted_products.py).

A layer calls its projections one by one. The first one called computes the outputs of all that read the same array.
Until the others are called, these outputs are kept beside that array (ops/tracing/known.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..ops.functional import is_floating
from ..ops.products.adapted_products import AdaptedMatrix, adapted_products
from ..ops.products.low_rank import covered
from ..ops.products.quantized_product import Quantization, serves
from ..ops.tracing import trace
from .adapter import Adapter
from .weights import quantization

# The names of modules that read one input, as the models of mlx-lm and mlx-vlm call them.
_READ_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
# The arrays of a packed matrix.
_PACKED = ("weight", "scales", "biases")


class _Ahead(NamedTuple):
    """The outputs of adapters that read an array together and have not been called yet, kept beside that array."""

    outputs: list[tuple[Adapter, mx.array]]


def together(model: nn.Module) -> AbstractContextManager[None]:
    """Within the context, adapters of `model` that read one input are computed together."""
    groups: list[list[Adapter]] = []
    for parent in model.modules():
        for names in _READ_TOGETHER:
            group = [parent[name] for name in names if isinstance(parent.get(name), Adapter)]
            if len(group) == len(names):
                groups.append(group)
    return trace.having(read_together=groups)


def output(module: Adapter, x: mx.array) -> mx.array | None:
    """Return the output of `module` for x [..., in], or None where the module must compute its output itself.

    Within `together`, neither x nor a factor may change in place between the calls of the modules that read x.
    """
    told = trace.current()
    if told.read_together is None:
        return None
    ahead = told.known.of(x, _Ahead)
    waiting = [] if ahead is None else ahead.outputs
    for place, (other, y) in enumerate(waiting):
        if other is module:
            del waiting[place]
            return y
    if not _joins(module, module, x):
        return None
    # Modules are dicts, which `in` would compare by their arrays.
    groups = (group for group in told.read_together if any(other is module for other in group))
    beside: Sequence[Any] = next(groups, [module])
    group = [other for other in beside if _joins(other, module, x)]
    outputs = adapted_products(x, [_matrix(other, x.dtype) for other in group], module.scale)
    computed = list(zip(group, outputs, strict=True))
    told.known.note(x, _Ahead([*waiting, *((other, y) for other, y in computed if other is not module)]))
    return next(y for other, y in computed if other is module)


def _joins(other: Adapter, module: Adapter, x: mx.array) -> bool:
    """Whether kernels can compute `other` for x in one call with `module`; with itself, whether they can at all."""
    if type(other) is not type(module) or other.dropout_rate or not _multiplies(other.base, x):
        return False
    return (other.rank, other.scale) == (module.rank, module.scale) and covered(other.rank, x)


def _multiplies(linear: nn.Module, x: mx.array) -> bool:
    """Whether a linear layer is nothing but a product of x with a matrix of x's dtype, dense or packed."""
    if type(linear) is nn.Linear:
        return set(linear) == {"weight"} and linear.weight.dtype == x.dtype
    if type(linear) is not nn.QuantizedLinear or not set(linear) <= set(_PACKED):
        return False
    scales = linear.scales
    return (scales.dtype == x.dtype or not is_floating(scales)) and serves(x, linear.weight, scales)


def _matrix(module: Adapter, dtype: mx.Dtype) -> AdaptedMatrix:
    linear = module.base
    factors = (module["lora_a"].astype(dtype), module["lora_b"].astype(dtype))
    if type(linear) is nn.Linear:
        return AdaptedMatrix([linear.weight], *factors)
    arrays = [linear[name] for name in _PACKED if linear.get(name) is not None]
    return AdaptedMatrix(arrays, *factors, Quantization(True, **quantization(linear)))
