"""Finds modules with arrays that their owner reads directly, by watching lazy forward passes.

An adapter changes the output of a call of a module. An owner that multiplies by `self.proj.weight` itself does not call
the module and so would bypass the adapter; such a module must not get one. Watching is cheap: MLX is lazy, so a forward
pass without an evaluation only builds a graph, for a model of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..layers import without_pictures
from ..ops.functional import undisturbed
from ..ops.random_state import drawing_from
from ..ops.watched_calls import as_subclasses

_ARRAY_NAMES = ("weight", "scales", "biases", "bias")


def directly_read(model: nn.Module, candidates: Mapping[str, nn.Module]) -> dict[str, str]:
    """Find the candidates with arrays that other code than their own methods reads in a forward pass.

    The passes are one in training mode over two tokens, and two in inference mode over two tokens and one, since models
    branch on both. An owner that reads the arrays of nn.Linear alone (after a test of the class) would call an adapter,
    so its modules do not count: the suspects of the first round run again behind stand-ins of another class. Afterwards
    the model, its layers' caches and the random state are as before.

    Args:
        model: Called with token ids [1, T].
        candidates: Modules of `model`, by path.

    Returns:
        The name of an array that is read directly, by the module's path.
    """
    paths = {id(module): path for path, module in candidates.items()}
    read: dict[str, str] = {}

    def record(module: nn.Module, name: str) -> None:
        read.setdefault(paths[id(module)], name)

    with drawing_from(mx.random.key(0)), undisturbed(model), _watched(candidates.values(), record):
        _run_forward_passes(model)
    suspects, read = {path: candidates[path] for path in read}, {}
    if suspects:
        with drawing_from(mx.random.key(0)), undisturbed(model), _replaced_by_stand_ins(model, suspects, record):
            _run_forward_passes(model)
    return read


def _run_forward_passes(model: nn.Module) -> None:
    for training, length in ((True, 2), (False, 2), (False, 1)):
        model.train(training)
        model(mx.zeros((1, length), dtype=mx.int32), **without_pictures(model))


class _StandIn(nn.Module):
    """Passes calls on to a module, as an adapter would, and records reads of the module's arrays."""

    def __init__(self, module: nn.Module, record: Callable[[nn.Module, str], None]) -> None:
        super().__init__()
        # object.__setattr__ keeps nn.Module from registering the module as a child.
        object.__setattr__(self, "_module_and_record", (module, record))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module_and_record[0](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        module, record = self._module_and_record
        if name in _ARRAY_NAMES:
            record(module, name)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARRAY_NAMES:
            setattr(self._module_and_record[0], name, value)
        else:
            super().__setattr__(name, value)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) if name in self._module_and_record[0] else default


@contextmanager
def _replaced_by_stand_ins(
    model: nn.Module, modules: Mapping[str, nn.Module], record: Callable[[nn.Module, str], None]
) -> Iterator[None]:
    """Within the context, a stand-in takes the place of each of these modules (path to module) in `model`."""
    owned: list[tuple[Any, Any, nn.Module]] = []
    for path, module in modules.items():
        *parents, last = path.split(".")
        owner: Any = model
        for name in parents:
            owner = owner[int(name)] if isinstance(owner, list) else owner[name]
        owned.append((owner, int(last) if isinstance(owner, list) else last, module))
    try:
        for owner, name, module in owned:
            _set_child(owner, name, _StandIn(module, record))
        yield
    finally:
        for owner, name, module in owned:
            _set_child(owner, name, module)


def _set_child(owner: Any, name: Any, module: nn.Module) -> None:
    if isinstance(owner, dict):
        dict.__setitem__(owner, name, module)
    else:
        owner[name] = module


@contextmanager
def _watched(modules: Iterable[nn.Module], record: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Within the context, reads of these modules' arrays from outside their own methods are recorded."""
    running: set[int] = set()
    with as_subclasses(modules, lambda cls: _watching_class(cls, running, record)):
        yield


def _watching_class(cls: type, running: set[int], record: Callable[[nn.Module, str], None]) -> type:
    """Make a subclass of `cls` that records reads of its arrays; `running` holds the ids of modules in a method."""

    def marked_as_running(function: Callable) -> Callable:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nested = id(self) in running
            running.add(id(self))
            try:
                return function(self, *args, **kwargs)
            finally:
                if not nested:
                    running.discard(id(self))

        return call

    def recorded(function: Callable) -> Callable:
        def read(self: nn.Module, name: str, *args: Any) -> Any:
            if name in _ARRAY_NAMES and id(self) not in running and dict.get(self, name) is not None:
                record(self, name)
            return function(self, name, *args)

        return read

    body: dict[str, Any] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nn.Module)]):
        for name, member in vars(base).items():
            if isinstance(member, property) and member.fget is not None:
                body[name] = property(marked_as_running(member.fget))
            elif isinstance(member, FunctionType) and (name == "__call__" or not name.startswith("__")):
                body[name] = marked_as_running(member)
    body["__getattr__"] = recorded(nn.Module.__getattr__)
    body["__getitem__"] = recorded(dict.__getitem__)
    body["get"] = recorded(dict.get)
    return type(f"Watched{cls.__name__}", (cls,), body)
