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
    """Within the context, each call of one of the modules goes through `around`.

    The class of each module is a subclass of the same name meanwhile, as in checkpoint.checkpointed.
    """
    originals = [(module, type(module)) for module in modules]
    classes = {original: _subclass(original, around) for _, original in originals}
    try:
        for module, original in originals:
            module.__class__ = classes[original]
        yield
    finally:
        for module, original in originals:
            module.__class__ = original


def _subclass(original: type, around: Around) -> type:
    def call(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        # Bound late: a subclass must call what the class holds now, also where a patch has replaced it.
        return around(self, lambda *a, **o: original.__call__(self, *a, **o), arguments, options)

    return type(original.__name__, (original,), {"__call__": call, "__module__": original.__module__})
