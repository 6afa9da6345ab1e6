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

from ..ops.random_state import drawing_from, get_key

_STORED = ("weight", "scales", "biases", "bias")


def directly_read(model: nn.Module, candidates: Mapping[str, nn.Module]) -> dict[str, str]:
    """{path: name of the array} of the candidates that someone other than themselves read in a forward pass.

    Watches a training pass over two tokens and inference over two and over one, since models branch on both. The
    model is left exactly as it was, caches inside its layers included, and so is the random state.
    """
    names = {id(module): path for path, module in candidates.items()}
    found: dict[str, str] = {}

    def record(module: nn.Module, key: str) -> None:
        found.setdefault(names[id(module)], key)

    with drawing_from(get_key()), _unchanged(model), _watched(candidates.values(), record):
        for training, length in ((True, 2), (False, 2), (False, 1)):
            for module in model.modules():
                module._training = training
            model(mx.zeros((1, length), dtype=mx.int32))
    return found


@contextmanager
def _unchanged(model: nn.Module) -> Any:
    before = [(module, dict(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, items, attributes in before:
            module.clear()
            dict.update(module, items)
            vars(module).clear()
            vars(module).update(attributes)


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
