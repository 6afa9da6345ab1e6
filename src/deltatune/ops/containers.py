"""A function's arguments taken apart into arrays, and put together again for every run of it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

# Objects that a layer changes while it runs, by the name of their class: the attributes that hold their arrays.
# ResidualBlocks: kimi_k3, whose layers append to it.
CONTAINERS: dict[str, tuple[str, ...]] = {"ResidualBlocks": ("raw", "inv_rms")}

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, mx.Dtype)

Rebuild = Callable[[list[mx.array]], Any]


def unknown_kind(tree: Any) -> str | None:
    """The class of the first leaf that is neither an array, nor a constant, nor an object of CONTAINERS."""
    if isinstance(tree, (mx.array, *_CONSTANTS)) or type(tree).__name__ in CONTAINERS:
        return None
    if type(tree) is dict:
        return unknown_kind(list(tree.values()))
    if type(tree) is list or isinstance(tree, tuple):
        return next((kind for kind in map(unknown_kind, tree) if kind is not None), None)
    return type(tree).__name__


class ArgumentArrays:
    """`arrays` of the arguments; `rebuild(arrays)` gives arguments for one run; `returned()` takes its result apart."""

    def __init__(self, tree: Any):
        unknown = unknown_kind(tree)
        if unknown is not None:
            raise ValueError(f"checkpoint: cannot take a {unknown}: the arrays in it would get no gradient.")
        self.arrays: list[mx.array] = []
        self._containers: list[_Container] = []
        self._handed: list[tuple[str, Callable[[], list], list]] = []
        self._rebuild = self._take(tree, self.arrays)

    def rebuild(self, arrays: list[mx.array]) -> Any:
        """The arguments around other arrays, with copies of lists, dicts and containers for the run to hold."""
        self._handed.clear()
        return self._rebuild(arrays)

    def returned(self, result: Any) -> tuple[list[mx.array], Rebuild]:
        """The arrays in the result of the run, and in its containers; and the result around other arrays.

        Rebuilding brings the caller's containers up to date, and puts them where the result holds their copies. To be
        done while the caller holds them; the run's copies are let go.
        Raises ValueError for a list, a dict, or another attribute of a container that the run changed.
        """
        for kind, contents, before in self._handed:
            now = contents()
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                raise ValueError(f"checkpoint: the function changed a {kind} that it was given.")
        self._handed.clear()
        arrays: list[mx.array] = []
        updates = [
            (container.original, name, self._take(getattr(container.copy, name), arrays))
            for container in self._containers
            for name in container.attributes
        ]
        make = self._take(result, arrays)
        for container in self._containers:
            container.copy = None

        def rebuild(arrays: list[mx.array]) -> Any:
            for original, name, attribute in updates:
                setattr(original(), name, attribute(arrays))
            return make(arrays)

        return arrays, rebuild

    def _take(self, tree: Any, arrays: list[mx.array]) -> Rebuild:
        if isinstance(tree, mx.array):
            index = len(arrays)
            arrays.append(tree)
            return lambda new: new[index]
        if type(tree) is dict:
            fields = {key: self._take(value, arrays) for key, value in tree.items()}
            return lambda new: self._hand({key: make(new) for key, make in fields.items()})
        if type(tree) is list or isinstance(tree, tuple):
            items = [self._take(item, arrays) for item in tree]
            if type(tree) is list:
                return lambda new: self._hand([make(new) for make in items])
            build = getattr(type(tree), "_make", type(tree))
            return lambda new: build([make(new) for make in items])
        if type(tree).__name__ in CONTAINERS:
            return self._take_container(tree, arrays)
        if isinstance(tree, _CONSTANTS):
            return lambda new: tree
        raise ValueError(f"checkpoint: the function returned a {type(tree).__name__}, which holds no arrays we know.")

    def _take_container(self, tree: Any, arrays: list[mx.array]) -> Rebuild:
        for known in self._containers:
            if tree is known.original():
                return lambda new: known.copy
            if tree is known.copy:
                return lambda new: known.original()
        container = _Container.of(tree)
        fields = {name: self._take(getattr(tree, name), arrays) for name in container.attributes}
        self._containers.append(container)

        def rebuild(new: list[mx.array]) -> Any:
            container.copy = copy.copy(container.empty)
            for name, make in fields.items():
                setattr(container.copy, name, make(new))
            self._watch(container.copy, container.others)
            return container.copy

        return rebuild

    def _hand(self, held: Any) -> Any:
        self._watch(held, lambda: list(held) if type(held) is list else [*held.keys(), *held.values()])
        return held

    def _watch(self, held: Any, contents: Callable[[], list]) -> None:
        self._handed.append((type(held).__name__, contents, contents()))


@dataclass
class _Container:
    """An object of CONTAINERS among the arguments. A run is given a copy of it to change.

    It is not held, for the sake of its arrays: gradients hold this for as long as their graph exists.
    """

    original: weakref.ref[Any]
    empty: Any
    attributes: tuple[str, ...]
    copy: Any = None

    @classmethod
    def of(cls, tree: Any) -> _Container:
        """`tree` as a container; `empty` is like it, without its arrays."""
        attributes, empty = CONTAINERS[type(tree).__name__], copy.copy(tree)
        for name in attributes:
            setattr(empty, name, None)
        return cls(weakref.ref(tree), empty, attributes)

    def others(self) -> list:
        """The copy's other attributes, which a run must leave alone."""
        rest = {name: value for name, value in vars(self.copy).items() if name not in self.attributes}
        return [*rest.keys(), *rest.values()]
