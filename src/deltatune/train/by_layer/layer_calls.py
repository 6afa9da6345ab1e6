"""Records how a model calls its layers, and redirects those calls.

A step by layers needs a model in three parts: the part before the layers, the layers, and the part behind them. No
family is known here by name. The model's own forward pass runs with other functions in the place of its layers: with
one that only records the calls, the part before the layers is left; with one that returns given hidden states from the
last layer, the part behind them; from another layer, the part between that layer and the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...errors import UserError
from ...ops.functional import is_floating
from ...ops.segments import MaskRule, remember, rule_of
from ...ops.watched_calls import calls_through

# Called as serve(index, call, arguments, options) in the place of a layer's own call, which is `call`.
Serve = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_CONSTANTS = (type(None), bool, int, float, str)


class ArrayArgument(NamedTuple):
    """An array that a layer is given beside its hidden states, by its place among those that all layers are given.

    `window`, `read` and `documents`, the place of the segments, are those of a mask's `rule`.
    """

    at: int
    rule: bool = False
    window: int | None = None
    read: bool = False
    documents: int | None = None


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer beside its hidden states: constants, and places of arrays."""

    positional: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    def arguments(self, arrays: Sequence[mx.array]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments around `arrays`; their masks have the rules of the recorded ones."""
        made: dict[ArrayArgument, mx.array] = {}

        def around(value: Any) -> Any:
            if type(value) is tuple:
                return tuple(map(around, value))
            if not isinstance(value, ArrayArgument):
                return value
            if value not in made:
                made[value] = arrays[value.at]
                if value.rule:
                    documents = None if value.documents is None else arrays[value.documents]
                    remember(made[value], MaskRule(value.window, documents, value.read))
            return made[value]

        return [around(value) for value in self.positional], {name: around(value) for name, value in self.keywords}


@dataclass
class Recorder:
    """Serves layers by recording how they are called; each returns the hidden states that it is given.

    `arrays` holds each array beside the hidden states once, and `entered` the hidden states that each layer got;
    `changed` are the positions of layers that got something else than the layer before had returned.
    """

    calls: list[LayerCall] = field(default_factory=list)
    arrays: list[mx.array] = field(default_factory=list)
    entered: list[mx.array] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    last: mx.array | None = None

    @property
    def floats(self) -> list[mx.array]:
        """The arrays of floats beside the hidden states."""
        return list(filter(is_floating, self.arrays))

    def __call__(self, index: int, _call: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Record a call.

        UserError where the model does not hand hidden states from layer to layer, or gives a layer something else than
        arrays and constants.
        """
        x = arguments[0] if arguments else None
        if index != len(self.calls) or not isinstance(x, mx.array):
            raise UserError(
                "memory: this model does not hand hidden states from each of its layers to the next, as a step by "
                "layers needs it; leave memory out."
            )
        if self.calls and x is not self.last:
            self.changed.append(index)
        self.entered.append(x)
        positional = tuple(map(self._taken, arguments[1:]))
        self.calls.append(LayerCall(positional, tuple((name, self._taken(value)) for name, value in options.items())))
        self.last = x
        return x

    def _taken(self, value: Any) -> Any:
        if isinstance(value, _CONSTANTS):
            return value
        if type(value) is tuple:
            return tuple(map(self._taken, value))
        if not isinstance(value, mx.array):
            raise UserError(
                f"memory: the layers of this model are given a {type(value).__name__} beside their hidden states, "
                "which a step by layers cannot hand on; leave memory out."
            )
        rule = rule_of(value)
        if rule is None:
            return ArrayArgument(self._place(value))
        documents = None if rule.segments is None else self._place(rule.segments)
        return ArrayArgument(self._place(value), True, rule.window, rule.read, documents)

    def _place(self, array: mx.array) -> int:
        for place, other in enumerate(self.arrays):
            if other is array:
                return place
        self.arrays.append(array)
        return len(self.arrays) - 1


class LayerCalls:
    """Redirects the calls of layers to the function of served_by(), and else to `otherwise`."""

    def __init__(self, layers: Sequence[nn.Module], otherwise: Serve):
        self._layers = list(layers)
        self._index = {id(layer): index for index, layer in enumerate(self._layers)}
        self._serve: Serve = otherwise

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the context, calls of the layers are redirected."""

        def around(layer: nn.Module, call: Callable[..., Any], arguments: tuple, options: dict[str, Any]) -> Any:
            return self._serve(self._index[id(layer)], call, arguments, options)

        with calls_through(self._layers, around):
            yield

    @contextmanager
    def served_by(self, serve: Serve) -> Iterator[None]:
        """Within the context, `serve` serves the calls."""
        before = self._serve
        self._serve = serve
        try:
            yield
        finally:
            self._serve = before


def by_itself(_index: int, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Serve a layer by itself."""
    return call(*arguments, **options)


def passed_on(_index: int, _call: Callable[..., Any], arguments: tuple[Any, ...], _options: dict[str, Any]) -> Any:
    """Serve a layer by returning the hidden states that it is given."""
    return arguments[0]
