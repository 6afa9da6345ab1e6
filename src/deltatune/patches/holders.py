"""Finds a function's owner (a module or class) and its holders (modules that imported it), and replaces it in all.

Modules that write `from package import function` hold the function itself. deltatune's own modules are never changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

from .patch_record import Function, Patch

_OWN_PACKAGE = __name__.partition(".")[0]
# Many of all loaded names are theirs, and they know nothing of MLX.
_UNRELATED = {"numpy", "pandas", "pyarrow", "matplotlib", "transformers", "huggingface_hub"}


class LoadedModules:
    """Every loaded module that may know MLX and is not deltatune's own, and which hold some functions under any name.

    One pass over all names finds every function. A pass for each of thirty functions would take half a second.
    """

    def __init__(self, functions: Iterable[Function]) -> None:
        self._functions = {id(function): function for function in functions}
        self._read()

    def __iter__(self) -> Iterator[ModuleType]:
        return chain.from_iterable(self._packages.values())

    def of(self, package: str) -> list[ModuleType]:
        """The modules of `package`, by the beginning of their names."""
        return self._packages.get(package, [])

    def holding(self, function: Function) -> list[tuple[ModuleType, str]]:
        """Each module that holds `function`, and the name there."""
        if len(sys.modules) != self._count or id(function) not in self._functions:
            self._functions[id(function)] = function
            self._read()
        return [(m, name) for m, name in self._places[id(function)] if vars(m).get(name) is function]

    def replace(self, old: Function, new: Function) -> None:
        """Put `new` in every module that holds `old`."""
        places = self.holding(old)
        for module, name in places:
            vars(module)[name] = new
        self._functions[id(new)] = new
        self._places.setdefault(id(new), []).extend(places)

    def _read(self) -> None:
        self._count = len(sys.modules)
        self._packages: dict[str, list[ModuleType]] = {}
        self._places: dict[int, list[tuple[ModuleType, str]]] = {key: [] for key in self._functions}
        wanted = frozenset(self._places)
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType):
                continue
            package = module.__name__.partition(".")[0]
            if package == _OWN_PACKAGE or package in _UNRELATED:
                continue
            self._packages.setdefault(package, []).append(module)
            # Most modules hold none, which is seen sooner so than by a loop over their names.
            if wanted.isdisjoint(map(id, vars(module).values())):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in wanted:
                    self._places[id(value)].append((module, name))


def defined_function(patch: Patch) -> Function | None:
    """The function defined by `patch.module`, from any module that still holds it under its own name."""
    value = attribute_of(patch)
    if _is_defined_by(patch, value) or _has_moved(patch, value):
        return value
    held = (module.__dict__.get(patch.attribute) for module in LoadedModules(()))
    return next((value for value in held if _is_defined_by(patch, value)), None)


def attribute_of(patch: Patch) -> Any:
    """The object that the target's module or class itself holds under the target's name, or None."""
    owner: Any = sys.modules[patch.module]
    for part in patch.name.split(".")[:-1]:
        owner = getattr(owner, part, None)
    return None if owner is None else vars(owner).get(patch.attribute)


def owner_of(patch: Patch) -> Any:
    """The module or class in which the target is defined."""
    owner: Any = sys.modules[patch.module]
    for part in patch.name.split(".")[:-1]:
        owner = getattr(owner, part)
    return owner


def holders(function: Function, patch: Patch, owner: Any, loaded: LoadedModules) -> list[str]:
    """The names of the modules that hold `function` under any name; for a method, the method's own full name."""
    if not isinstance(owner, ModuleType):
        return [patch.target] if vars(owner).get(patch.attribute) is function else []
    names = {module.__name__ for module, _ in loaded.holding(function)}
    return sorted(names | {owner.__name__} if vars(owner).get(patch.attribute) is function else names)


def rebind(attribute: str, owner: Any, old: Function, new: Function, loaded: LoadedModules) -> None:
    """Put `new` wherever `old` is held: under this name in its owner and, for a function, in every module."""
    # A submodule of a compiled package is an owner, and not in sys.modules.
    if vars(owner).get(attribute) is old:
        setattr(owner, attribute, new)
    if isinstance(owner, ModuleType):
        loaded.replace(old, new)


def _is_defined_by(patch: Patch, value: Any) -> bool:
    """Whether `value` is the function that `patch.module` defines."""
    if isinstance(value, FunctionType):
        defining = sys.modules[patch.module]
        return value.__code__.co_name == patch.attribute and value.__globals__ is vars(defining)
    # A compiled function has neither code nor globals, so only the names that it states can be compared.
    stated = (getattr(value, "__module__", None), getattr(value, "__name__", None))
    return not patch.signature and stated == (_stated_module(patch), patch.attribute)


def _has_moved(patch: Patch, value: Any) -> bool:
    """Whether `value` is a function of the package that another of its modules defines, and the target's imports."""
    if not isinstance(value, FunctionType) or value.__code__.co_name != patch.attribute:
        return False
    return str(value.__globals__.get("__name__")).partition(".")[0] == patch.package


def _stated_module(patch: Patch) -> str:
    """The module that a compiled function states: `mlx.core.fast` for the name `fast.rope` in `mlx.core`."""
    owner = getattr(sys.modules[patch.module], patch.name.partition(".")[0], None)
    return owner.__name__ if isinstance(owner, ModuleType) else patch.module
