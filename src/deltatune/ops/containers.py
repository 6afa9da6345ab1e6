"""Takes a function's arguments and results apart into arrays, and puts them together again around other arrays.

A custom function of MLX takes and returns arrays only, while layers recomputed by checkpoint.py take and return lists,
dicts, tuples and objects that hold arrays.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .segments import rule_of

# Classes of objects that a layer may change while it runs, by name, and the attributes that it may change.
# The layers of kimi_k3 append to ResidualBlocks. Layers of afm7 and deepseek_v41 leave arrays there that later ones
# share.
CONTAINERS: dict[str, tuple[str, ...]] = {
    "ResidualBlocks": ("raw", "inv_rms"),
    "ConcatenateKVCache": ("keys", "values", "offset"),
    "LayerCache": ("window", "compress_kv", "index_k", "pending_kv", "pending_gate", "offset"),
}

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, mx.Dtype)

# Puts a structure together around the arrays that it is given.
Rebuild = Callable[[list[mx.array]], Any]


def unknown_kind(tree: Any) -> str | None:
    """Return the class name of the first leaf that is no array, constant or container; None if there is none."""
    if isinstance(tree, (mx.array, *_CONSTANTS)) or type(tree).__name__ in CONTAINERS:
        return None
    if type(tree) is dict:
        return unknown_kind(list(tree.values()))
    if type(tree) is list or isinstance(tree, tuple):
        return next((kind for kind in map(unknown_kind, tree) if kind is not None), None)
    return type(tree).__name__


class ArgumentArrays:
    """The arrays in a function's arguments, and the way back from arrays to arguments and results.

    The arguments are arrays, constants, containers, and lists, tuples and dicts of them (`unknown_kind`).
    """

    def __init__(self, tree: Any):
        self.arrays: list[mx.array] = []
        self._containers: list[_Container] = []
        # Objects that a run must not change: the name of the class, a function that lists the contents, and the list
        # before.
        self._unchangeable: list[tuple[str, Callable[[], list], list]] = []
        self._rebuild = self._take_apart(tree, self.arrays)

    def rebuild(self, arrays: list[mx.array]) -> Any:
        """Return the arguments for one run around other arrays; its lists, dicts and containers are copies."""
        self._unchangeable.clear()
        return self._rebuild(arrays)

    def returned(self, result: Any) -> tuple[list[mx.array], Rebuild]:
        """Take the result of the run apart, and drop the run's copies of the containers.

        Returned are the arrays in the result and in the containers, and a function that puts the result together around
        other arrays. That function also updates the caller's containers, and puts them where the result holds their
        copies; it must be called while the caller's containers are alive. ValueError where the run changed a list, a
        dict, or an attribute of a container that holds no arrays.
        """
        for kind, contents, before in self._unchangeable:
            after = contents()
            if len(after) != len(before) or any(a is not b for a, b in zip(after, before, strict=True)):
                raise ValueError(f"checkpoint: the function changed a {kind} that it was given.")
        self._unchangeable.clear()
        arrays: list[mx.array] = []
        updates = [
            (container.original, name, self._take_apart(getattr(container.copy, name), arrays))
            for container in self._containers
            for name in container.attributes
        ]
        make = self._take_apart(result, arrays)
        for container in self._containers:
            container.copy = None

        def rebuild(arrays: list[mx.array]) -> Any:
            for original, name, attribute in updates:
                setattr(original(), name, attribute(arrays))
            return make(arrays)

        return arrays, rebuild

    def _take_apart(self, tree: Any, arrays: list[mx.array]) -> Rebuild:
        """Append the arrays in `tree` to `arrays`, and return the function that puts `tree` together again."""
        # As an argument of a custom function, a mask would be computed, and be another array that no rule is known for.
        if isinstance(tree, mx.array) and rule_of(tree) is not None:
            return lambda new: tree
        if isinstance(tree, mx.array):
            index = len(arrays)
            arrays.append(tree)
            return lambda new: new[index]
        if type(tree) is dict:
            fields = {key: self._take_apart(value, arrays) for key, value in tree.items()}
            return lambda new: self._watched({key: make(new) for key, make in fields.items()})
        if type(tree) is list or isinstance(tree, tuple):
            items = [self._take_apart(item, arrays) for item in tree]
            if type(tree) is list:
                return lambda new: self._watched([make(new) for make in items])
            build = getattr(type(tree), "_make", type(tree))
            return lambda new: build([make(new) for make in items])
        if type(tree).__name__ in CONTAINERS:
            return self._take_container_apart(tree, arrays)
        if isinstance(tree, _CONSTANTS):
            return lambda new: tree
        raise ValueError(
            f"checkpoint: the function returned a {type(tree).__name__}; expected arrays, and lists, tuples or dicts "
            "of them."
        )

    def _take_container_apart(self, tree: Any, arrays: list[mx.array]) -> Rebuild:
        for known in self._containers:
            if tree is known.original():
                return lambda new: known.copy
            if tree is known.copy:
                return lambda new: known.original()
        container = _Container.of(tree)
        fields = {name: self._take_apart(getattr(tree, name), arrays) for name in container.attributes}
        self._containers.append(container)

        def rebuild(new: list[mx.array]) -> Any:
            container.copy = copy.copy(container.empty)
            for name, make in fields.items():
                setattr(container.copy, name, make(new))
            self._watch(container.copy, container.others)
            return container.copy

        return rebuild

    def _watched(self, collection: Any) -> Any:
        is_list = type(collection) is list
        self._watch(collection, lambda: list(collection) if is_list else [*collection.keys(), *collection.values()])
        return collection

    def _watch(self, container: Any, contents: Callable[[], list]) -> None:
        self._unchangeable.append((type(container).__name__, contents, contents()))


@dataclass
class _Container:
    """An object of CONTAINERS among the arguments, of which every run gets a copy to change.

    The caller's object is referred to weakly, since a graph that waits for its gradients would keep its arrays alive.
    """

    original: weakref.ref[Any]
    # A copy of the object without its arrays.
    empty: Any
    # The names of the attributes that hold its arrays.
    attributes: tuple[str, ...]
    # The copy that the present run may change.
    copy: Any = None

    @classmethod
    def of(cls, tree: Any) -> _Container:
        attributes = CONTAINERS[type(tree).__name__]
        empty = copy.copy(tree)
        for name in attributes:
            setattr(empty, name, None)
        return cls(weakref.ref(tree), empty, attributes)

    def others(self) -> list:
        """Return the names and values of the copy's other attributes, which a run must not change."""
        others = {name: value for name, value in vars(self.copy).items() if name not in self.attributes}
        return [*others.keys(), *others.values()]
