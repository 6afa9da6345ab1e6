"""Compiles one function for all layers of a model that compute alike, with their arrays as its inputs."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...ops.functional import is_floating, undisturbed
from ...ops.random_state import drawing_with
from ...ops.tracing import side_outputs, trace
from ..tree import array_places, holding, leaves
from .layer_calls import LayerCall

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, mx.Dtype)


def lowest_layer(model: nn.Module, paths: Sequence[str]) -> int:
    """Return the position of the first layer that a backward pass reaches, of those at `paths` in the model.

    It is the first in which something trains, 0 if something outside the layers does, and their number if nothing does.
    """
    trained = [path for path, _ in leaves(model.trainable_parameters())]
    if any(not path.startswith(tuple(f"{layer}." for layer in paths)) for path in trained):
        return 0
    reached = (at for at, layer in enumerate(paths) if any(path.startswith(f"{layer}.") for path in trained))
    return next(reached, len(paths))


def signature(tree: Any) -> Any:
    """Return a hashable value that two layers share if they compute the same function of their arrays.

    It is their classes, their attributes, and the shapes and dtypes of the arrays that array_places() finds. Of an
    object that cannot be looked into, they must share the very same. A whole number that is written
    and never read, as Kimi-Linear keeps each layer's position, may differ.
    """
    if isinstance(tree, mx.array):
        return tree.shape, str(tree.dtype)
    if isinstance(tree, nn.Module):
        read = {
            name: value for name, value in vars(tree).items() if type(value) is not int or _is_read(type(tree), name)
        }
        attributes = tuple((name, _attribute(value)) for name, value in sorted(read.items()))
        return type(tree), attributes, tuple((key, signature(value)) for key, value in tree.items())
    if type(tree) is dict:
        return tuple((key, signature(value)) for key, value in tree.items())
    return tuple(map(signature, tree)) if type(tree) is list else _attribute(tree)


@cache
def _is_read(cls: type, name: str) -> bool:
    """Whether a module with a class or a function in it reads an attribute; True without source."""
    bases = [base for base in cls.__mro__ if base not in nn.Module.__mro__]
    # A patch may have put a function there that another file holds.
    functions = [value for base in bases for value in vars(base).values() if isinstance(value, FunctionType)]
    try:
        sources = [inspect.getsource(sys.modules[name]) for name in {part.__module__ for part in (*bases, *functions)}]
    except (KeyError, OSError, TypeError):
        return True
    read = re.compile(rf"""\.{name}\b(?!\s*=[^=])|["']{name}["']""")
    return any(map(read.search, sources))


def _attribute(value: Any) -> Any:
    if isinstance(value, _CONSTANTS):
        return type(value), str(value)
    if isinstance(value, (set, frozenset)) and all(isinstance(member, str) for member in value):
        return frozenset(value)
    return tuple(map(_attribute, value)) if type(value) in (tuple, list) else id(value)


class BatchInTrace(NamedTuple):
    """The arrays of the batch that the functions inside a layer read in the trace; None for those that they do not.

    `documents` [B, T] are those of a packed batch; `real` [B, T] are the positions with tokens that count for routers.
    """

    documents: mx.array | None
    real: mx.array | None


class LayerFunction:
    """The forward and the backward pass of all layers with one signature, called in one way.

    The first of these layers runs, with the arrays of the one that is asked for in the place of its own. MLX compiles a
    pass once for each set of shapes. `collects` asks for the layer's side outputs.
    """

    def __init__(self, layer: nn.Module, call: LayerCall, collects: bool):
        self._layer = layer
        self._call = call
        self._collects = collects
        places = dict(array_places(layer))
        self._places = list(places.values())
        floating = [path for path, array in leaves(layer.trainable_parameters()) if is_floating(array)]
        trained = set(floating)
        #: The paths of the arrays that train, in the order in which backward() returns their gradients.
        self.trained = [path for path in places if path in trained]
        self._trained = [at for at, path in enumerate(places) if path in trained]
        self.forward: Callable[..., Any] = mx.compile(self._forward)
        self.backward: Callable[..., Any] = mx.compile(self._backward)

    def _forward(
        self, arrays: Sequence[mx.array], x: mx.array, others: Sequence[mx.array], told: Sequence[Any], key: mx.array
    ) -> tuple[mx.array, list[mx.array], mx.array]:
        """Return the layer's output, its side outputs, and the key with which the next one draws."""
        with self._holding(arrays, told):
            return self._run(x, others, key)

    def _backward(
        self,
        arrays: Sequence[mx.array],
        x: mx.array,
        others: Sequence[mx.array],
        told: Sequence[Any],
        key: mx.array,
        dy: mx.array,
        d_sides: Sequence[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        """Return the gradients of x and of the arrays that train, from those of the output and the side outputs."""

        def outputs(x: mx.array, *trained: mx.array) -> list[mx.array]:
            held = list(arrays)
            for at, array in zip(self._trained, trained, strict=True):
                held[at] = array
            with self._holding(held, told):
                y, sides, _ = self._run(x, others, key)
            return [y, *sides]

        # A checkpoint runs the layer again when `outputs` has returned, with the frozen arrays that it holds then.
        with self._holding(arrays, told):
            _, (dx, *gradients) = mx.vjp(outputs, [x, *(arrays[at] for at in self._trained)], [dy, *d_sides])
        return dx, gradients

    def _run(self, x: mx.array, others: Sequence[mx.array], key: mx.array) -> tuple[mx.array, list[mx.array], mx.array]:
        positional, keywords = self._call.arguments(others)
        state = [key]
        with drawing_with(state), side_outputs.collecting(self._collects) as sides:
            y = self._layer(x, *positional, **keywords)
        return y, sides, state[0]

    @contextmanager
    def _holding(self, arrays: Sequence[mx.array], told: Sequence[Any]) -> Iterator[None]:
        """Within the context, the layer holds `arrays`, and the trace a BatchInTrace of the compiled function."""
        documents, real = told
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self._layer))
            stack.enter_context(trace.having(segments=documents))
            if real is not None:
                watch = trace.current().routers
                assert watch is not None
                stack.enter_context(trace.having(routers=watch._replace(real=real)))
            # undisturbed() leaves arrays in lists.
            stack.enter_context(holding(self._places, arrays))
            yield
