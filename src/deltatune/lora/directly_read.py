"""Finds the modules whose weight their owner reads itself, by watching forward passes that compute nothing.

An adapter changes what a module returns when called. An owner that multiplies with `self.proj.weight` on its own would
go past the adapter, so such a module must be left alone. MLX is lazy: a forward pass that is never evaluated only
builds a graph, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.functional import undisturbed
from ..ops.random_state import drawing_from, get_key

_STORED = ("weight", "scales", "biases", "bias")


def directly_read(model: nn.Module, candidates: Mapping[str, nn.Module]) -> dict[str, str]:
    """{path: name of the array} of the candidates that someone other than themselves read in a forward pass.

    Watches a training pass over two tokens and inference over two and over one, since models branch on both. What an
    owner reads of plain layers alone, telling them by their class, is not counted: it would call an adapter. The
    model is left exactly as it was, caches inside its layers included, and so is the random state.
    """
    names = {id(module): path for path, module in candidates.items()}
    found: dict[str, str] = {}

    def record(module: nn.Module, key: str) -> None:
        found.setdefault(names[id(module)], key)

    with drawing_from(get_key()), undisturbed(model), _watched(candidates.values(), record):
        _run(model)
    suspects, found = {path: candidates[path] for path in found}, {}
    if suspects:
        with drawing_from(get_key()), undisturbed(model), _replaced(model, suspects, record):
            _run(model)
    return found


def _run(model: nn.Module) -> None:
    for training, length in ((True, 2), (False, 2), (False, 1)):
        for module in model.modules():
            module._training = training
        model(mx.zeros((1, length), dtype=mx.int32))


class _InPlaceOf(nn.Module):
    """Stands where an adapter would, of another class than the module; says who asks it for the module's arrays."""

    def __init__(self, module: nn.Module, record: Callable[[nn.Module, str], None]) -> None:
        super().__init__()
        # In a tuple, which nn.Module does not take for a child.
        object.__setattr__(self, "_behind", (module, record))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._behind[0](*args, **kwargs)

    def __getattr__(self, key: str) -> Any:
        module, record = self._behind
        if key in _STORED:
            record(module, key)
        return getattr(module, key)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key) if key in self._behind[0] else default


@contextmanager
def _replaced(model: nn.Module, modules: Mapping[str, nn.Module], record: Callable[[nn.Module, str], None]) -> Any:
    owners: list[tuple[Any, Any, nn.Module]] = []
    for path, module in modules.items():
        *parents, last = path.split(".")
        owner: Any = model
        for name in parents:
            owner = owner[int(name)] if isinstance(owner, list) else owner[name]
        owners.append((owner, int(last) if isinstance(owner, list) else last, module))
    try:
        for owner, name, module in owners:
            _put(owner, name, _InPlaceOf(module, record))
        yield
    finally:
        for owner, name, module in owners:
            _put(owner, name, module)


def _put(owner: Any, name: Any, module: nn.Module) -> None:
    if isinstance(owner, dict):
        dict.__setitem__(owner, name, module)
    else:
        owner[name] = module


@contextmanager
def _watched(modules: Any, record: Callable[[nn.Module, str], None]) -> Any:
    originals = [(module, type(module)) for module in modules]
    busy: set[int] = set()
    spies = {cls: _spy(cls, busy, record) for _, cls in originals}
    try:
        for module, cls in originals:
            module.__class__ = spies[cls]
        yield
    finally:
        for module, cls in originals:
            module.__class__ = cls


def _spy(cls: type, busy: set[int], record: Callable[[nn.Module, str], None]) -> type:
    """A subclass of `cls` that reports reads of its arrays from outside its own methods."""

    def guarded(function: Callable) -> Callable:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nested = id(self) in busy
            busy.add(id(self))
            try:
                return function(self, *args, **kwargs)
            finally:
                if not nested:
                    busy.discard(id(self))

        return call

    def reading(function: Callable) -> Callable:
        def read(self: nn.Module, key: str, *args: Any) -> Any:
            if key in _STORED and id(self) not in busy and dict.get(self, key) is not None:
                record(self, key)
            return function(self, key, *args)

        return read

    body: dict[str, Any] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nn.Module)]):
        for name, member in vars(base).items():
            if isinstance(member, property) and member.fget is not None:
                body[name] = property(guarded(member.fget))
            elif callable(member) and (name == "__call__" or not name.startswith("__")):
                body[name] = guarded(member)
    body["__getattr__"] = reading(nn.Module.__getattr__)
    body["__getitem__"] = reading(dict.__getitem__)
    body["get"] = reading(dict.get)
    return type(f"Watched{cls.__name__}", (cls,), body)
