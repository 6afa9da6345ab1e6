"""A module's trainable arrays as explicit arguments.

MLX gives a zero gradient, silently, to an array that a custom function only closes over; so operators that run a
module inside one take its trainable arrays as arguments, and lend them to the module for the length of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten


def trainable(module: nn.Module) -> tuple[list[str], list[mx.array]]:
    """Paths and arrays of the module's trainable floating-point parameters, in a fixed order."""
    flat: Any = tree_flatten(module.trainable_parameters())
    found = [(path, array) for path, array in flat if is_floating(array)]
    return [path for path, _ in found], [array for _, array in found]


def is_floating(array: mx.array) -> bool:
    """Whether a gradient can flow to it."""
    return mx.issubdtype(array.dtype, mx.floating)


@cache
def promoted(one: mx.Dtype, other: mx.Dtype) -> mx.Dtype:
    """The type of their sum; mx.result_type came after mlx 0.31.2."""
    return (mx.zeros((), one) + mx.zeros((), other)).dtype


@contextmanager
def holding(module: nn.Module, paths: Sequence[str], arrays: Sequence[mx.array]) -> Iterator[None]:
    """Within the context, `module` holds `arrays` at `paths`; afterwards, what it held before."""
    if not paths:
        yield
        return
    held = dict(tree_flatten(module.parameters()))
    module.update(tree_unflatten(list(zip(paths, arrays, strict=True))))
    try:
        yield
    finally:
        module.update(tree_unflatten([(path, held[path]) for path in paths]))


@contextmanager
def undisturbed(module: nn.Module | None) -> Iterator[None]:
    """Whatever is set on `module` or a part of it within the context is undone afterwards."""
    parts = [] if module is None else module.modules()
    held = [(part, dict(part), dict(vars(part))) for part in parts]
    try:
        yield
    finally:
        for part, entries, attributes in held:
            dict.clear(part)
            dict.update(part, entries)
            vars(part).clear()
            vars(part).update(attributes)
