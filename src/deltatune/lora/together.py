"""Computes the adapters that read one input together, while a training step is traced (ops/adapted_products.py).

A layer calls its projections one by one. The first of them that is called computes the outputs of all that read the
same array, and each of the others finds its own there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx
import mlx.nn as nn

from ..ops.adapted_products import AdaptedMatrix, adapted_products
from ..ops.functional import is_floating
from ..ops.low_rank import covered
from ..ops.quantized_product import Quantization, serves
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


class AdaptersTogether:
    """Which adapters of a model read one input, and outputs that were computed and not yet asked for."""

    def __init__(self, model: nn.Module):
        self._groups: dict[int, list[Adapter]] = {}
        # By id of a module that has not been called yet: the input for which another of its group was called, and this
        # module's output for it.
        self._computed: dict[int, tuple[mx.array, mx.array]] = {}
        for parent in model.modules():
            for names in _READ_TOGETHER:
                group = [parent[name] for name in names if isinstance(parent.get(name), Adapter)]
                if len(group) == len(names):
                    self._groups |= {id(module): group for module in group}

    def output(self, module: Adapter, x: mx.array) -> mx.array | None:
        """Return the output of `module` for x [..., in], or None where the module must compute its output itself.

        Neither x nor a factor may change in place between the calls of the modules that read x.
        """
        source, y = self._computed.pop(id(module), (None, None))
        if source is x:
            return y
        if not _joins(module, module, x):
            return None
        group = [other for other in self._groups.get(id(module), [module]) if _joins(other, module, x)]
        matrices = [_matrix(other, x.dtype) for other in group]
        outputs = dict(zip(map(id, group), adapted_products(x, matrices, module.scale), strict=True))
        own = outputs.pop(id(module))
        self._computed |= {key: (x, output) for key, output in outputs.items()}
        return own


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
    linear, factors = module.base, (module["lora_a"].astype(dtype), module["lora_b"].astype(dtype))
    if type(linear) is nn.Linear:
        return AdaptedMatrix([linear.weight], *factors)
    arrays = [linear[name] for name in _PACKED if linear.get(name) is not None]
    return AdaptedMatrix(arrays, *factors, Quantization(True, **quantization(linear)))


_current: ContextVar[AdaptersTogether | None] = ContextVar("deltatune_adapters_together", default=None)


@contextmanager
def together(model: nn.Module) -> Iterator[None]:
    """Within the context, adapters of `model` that read one input are computed together."""
    token = _current.set(AdaptersTogether(model))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> AdaptersTogether | None:
    """Return what the innermost `together` has made, or None."""
    return _current.get()
