"""Lets a model compute in fp32 with drawn weights for a while, so that the effect of its layers can be measured.

Its own weights may hide it: layers with an output projection of zero pass nothing on, and 16 bits round small
differences away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..lora.adapter import Adapter
from ..ops.functional import is_floating, undisturbed
from ..ops.watched_calls import calls_through

# The weights repeat after so many numbers. It is a prime, so that no two rows of a matrix are the same.
_PERIOD = 65_521
# Codes of quantised weights are drawn without this bit of each byte, so that none of them is NaN.
_NO_NAN = 0xBFBFBFBF


@contextmanager
def drawn_weights(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Within the context, every weight of `model` is a drawn one, floating-point weights in fp32.

    Afterwards the model holds the arrays that it held before. The arrays of adapters are not drawn, since an adapter
    computes each token by itself. Each layer holds its drawn weights while it is called, and its result is computed
    before it returns, so that there is room for one layer's weights in fp32 and not for the model's. A layer holds the
    same ones in every call.

    Args:
        model: The model.
        layers: Its layers.
    """
    table = mx.random.uniform(-1, 1, (_PERIOD,), key=mx.random.key(0))
    inside = {id(module) for layer in layers for module in layer.modules()}
    places = {id(layer): place for place, layer in enumerate(layers, 1)}

    def drawn(layer: nn.Module, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with undisturbed(layer):
            _draw(layer.modules(), table, places[id(layer)])
            result = call(*arguments, **options)
            mx.eval(result)
        return result

    with undisturbed(model), calls_through(layers, drawn):
        _draw([module for module in model.modules() if id(module) not in inside], table, 0)
        yield


def _draw(modules: Sequence[nn.Module], table: mx.array, start: int) -> None:
    """Put drawn arrays in the place of the parameters of `modules`. MLX draws those that are used when they are."""
    for number, module in enumerate(modules):
        trained = isinstance(module, Adapter) or "lora_a" in module
        numbers = _numbers(table, start * 9_973 + number * 97)
        for name, array in list(module.items()):
            if not isinstance(array, mx.array) or name.startswith("_"):
                continue
            if is_floating(array):
                drawn = array.astype(mx.float32) if trained else _floats(array.shape, numbers)
            elif array.dtype == mx.uint32 and "scales" in module:
                drawn = (numbers(array.size) * 2.0**31).astype(mx.int32).view(mx.uint32).reshape(array.shape) & _NO_NAN
            else:
                continue
            dict.__setitem__(module, name, drawn)


def _numbers(table: mx.array, start: int) -> Callable[[int], mx.array]:
    """Return a function that gives so many numbers between -1 and 1, from a place in the table on."""
    start %= _PERIOD

    def numbers(size: int) -> mx.array:
        return mx.tile(mx.concatenate([table[start:], table[:start]]), -(-size // _PERIOD))[:size]

    return numbers


def _floats(shape: tuple[int, ...], numbers: Callable[[int], mx.array]) -> mx.array:
    """Return weights that pass on about as much as they are given, and vectors (norms, biases) from 0.1 to 1."""
    drawn = numbers(math.prod(shape)).reshape(shape)
    if len(shape) < 2:
        return 0.55 + 0.45 * drawn
    # A convolution that mixes no channels has one input in its last axis.
    inputs = shape[-1] if shape[-1] > 1 else shape[-2]
    return drawn * math.sqrt(3 / inputs)
