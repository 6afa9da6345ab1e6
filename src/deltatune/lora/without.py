"""Takes the adapters of a model away for a while, so that the base answers with the same weights in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.nn as nn
from mlx.utils import tree_unflatten

from .adapter import Adapter
from .convert import adapters
from .new_rows import grown_tables


def can_be_without(model: nn.Module) -> bool:
    """Tell whether the base of `model` is in it: all that was trained is adapters, which can be taken away."""
    adapted = adapters(model)
    return (
        bool(adapted) and all(isinstance(adapter, Adapter) for adapter in adapted.values()) and not grown_tables(model)
    )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Put the base of each adapter in its place inside the `with` block."""
    adapted = {path: adapter for path, adapter in adapters(model).items() if isinstance(adapter, Adapter)}
    model.update_modules(tree_unflatten([(path, adapter.base) for path, adapter in adapted.items()]))
    try:
        yield
    finally:
        model.update_modules(tree_unflatten(list(adapted.items())))
