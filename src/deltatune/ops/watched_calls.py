"""Runs the calls of chosen modules through a function, without a trace afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

# Called as around(module, call, arguments, options); it calls call(*arguments, **options), and returns the result.
Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def calls_through(modules: Iterable[nn.Module], around: Around) -> Iterator[None]:
    """Within the context, each call of one of the modules goes through `around`."""
    with as_subclasses(modules, lambda original: _calling(original, around)):
        yield


@contextmanager
def as_subclasses(modules: Iterable[nn.Module], subclass: Callable[[type], type]) -> Iterator[None]:
    """Within the context, each module is of the class that `subclass` makes of its own, once for each class.

    RuntimeError where other code changed the class of a module within the context; it keeps the other code's class.
    """
    originals = {id(module): (module, type(module)) for module in modules}.values()
    classes = {original: subclass(original) for _, original in originals}
    foreign = []
    try:
        for module, original in originals:
            module.__class__ = classes[original]
        yield
    finally:
        for module, original in originals:
            if type(module) is classes[original]:
                module.__class__ = original
            elif type(module) is not original:
                foreign.append(type(module).__name__)
        if foreign:
            raise RuntimeError(f"other code changed the class of {foreign} within the context; they stay as they are.")


def _calling(original: type, around: Around) -> type:
    """Make a subclass of the same name with calls that go through `around`."""

    def call(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        # Bound late: a subclass must call the class's present function, also where a patch has replaced it.
        return around(self, lambda *a, **o: original.__call__(self, *a, **o), arguments, options)

    return type(original.__name__, (original,), {"__call__": call, "__module__": original.__module__})
