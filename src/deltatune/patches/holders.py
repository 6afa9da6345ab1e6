"""Finds the module or class that owns a function and the modules that hold it by value, and replaces it in all of them.

Modules that write `from package import function` hold the function itself. deltatune's own modules are never changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from .patch_record import Function, Patch

_OWN_PACKAGE = __name__.partition(".")[0]


def defined_function(patch: Patch) -> Function | None:
    """The function that `patch.module` defines, from any module that still holds it under its own name."""
    for namespace in [vars(owner_of(patch))] + [vars(module) for module in loaded_modules()]:
        value: Any = namespace.get(patch.attribute)
        if _is_defined_by(patch, value):
            return value
    return None


def owner_of(patch: Patch) -> Any:
    """The module or class in which the target is defined."""
    owner: Any = sys.modules[patch.module]
    for part in patch.name.split(".")[:-1]:
        owner = getattr(owner, part)
    return owner


def loaded_modules() -> Iterator[ModuleType]:
    """Every loaded module that is not deltatune's own."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.partition(".")[0] != _OWN_PACKAGE:
            yield module


def holders(function: Function, patch: Patch) -> list[str]:
    """The names of the modules that hold `function` under any name; for a method, the method's own full name."""
    owner = owner_of(patch)
    if not isinstance(owner, ModuleType):
        return [patch.target] if vars(owner).get(patch.attribute) is function else []
    return sorted(m.__name__ for m in _places(owner) if any(value is function for value in list(vars(m).values())))


def rebind(patch: Patch, old: Function, new: Function) -> None:
    """Put `new` wherever `old` is held: in the class of a method, else in every module."""
    owner = owner_of(patch)
    if not isinstance(owner, ModuleType):
        if vars(owner).get(patch.attribute) is old:
            setattr(owner, patch.attribute, new)
        return
    for module in _places(owner):
        for name, value in list(vars(module).items()):
            if value is old:
                vars(module)[name] = new


def _places(owner: ModuleType) -> Iterator[ModuleType]:
    """Every module that may hold a function of `owner`. Submodules of compiled packages are not in sys.modules."""
    yield owner
    yield from (module for module in loaded_modules() if module is not owner)


def _is_defined_by(patch: Patch, value: Any) -> bool:
    """Whether `value` is the function that `patch.module` defines."""
    if isinstance(value, FunctionType):
        defining = sys.modules[patch.module]
        return value.__code__.co_name == patch.attribute and value.__globals__ is vars(defining)
    # A compiled function has neither code nor globals, so only the names that it states can be compared.
    stated = (getattr(value, "__module__", None), getattr(value, "__name__", None))
    return not patch.signature and stated == (_stated_module(patch), patch.attribute)


def _stated_module(patch: Patch) -> str:
    """The module that a compiled function states: `mlx.core.fast` for the name `fast.rope` in `mlx.core`."""
    owner = getattr(sys.modules[patch.module], patch.name.partition(".")[0], None)
    return owner.__name__ if isinstance(owner, ModuleType) else patch.module
