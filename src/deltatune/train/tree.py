"""Wraps functions of MLX on trees, scalars and random keys, with types."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten


def leaves(tree: Any) -> list[tuple[str, mx.array]]:
    """Return the (dotted path, array) of every leaf, in order."""
    return tree_flatten(tree)  # type: ignore[return-value]


def nbytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(array.nbytes for _, array in leaves(tree))


@dataclass
class Place:
    """Where a tree holds an array: an entry of a dict (as a module is), or of a list."""

    container: Any
    key: str | int

    @property
    def array(self) -> mx.array:
        return self.container[self.key]

    @array.setter
    def array(self, array: mx.array) -> None:
        self.container[self.key] = array


def array_places(tree: Any, prefix: str = "") -> Iterator[tuple[str, Place]]:
    """Yield the dotted path and the place of each array in a tree of modules, dicts and lists, in order.

    Unlike a module's parameters(), these are all its arrays, also those with names that begin with an underscore.
    """
    entries: Any = enumerate(tree) if isinstance(tree, list) else ()
    if isinstance(tree, dict):
        entries = tree.items()
    for key, value in entries:
        if isinstance(value, mx.array):
            yield f"{prefix}{key}", Place(tree, key)
        else:
            yield from array_places(value, f"{prefix}{key}.")


def places(tree: Any, paths: Sequence[str]) -> dict[str, Place]:
    """Return the places of the arrays at dotted `paths` of a tree or module."""
    by_path = {}
    for path in paths:
        above, _, last = path.rpartition(".")
        container = at(tree, above)
        by_path[path] = Place(container, int(last) if isinstance(container, list) else last)
    return by_path


def arrays_at(held: Collection[Place]) -> list[mx.array]:
    """Return the arrays at these places."""
    return [place.array for place in held]


def put(held: Collection[Place], arrays: Sequence[mx.array]) -> None:
    """Put `arrays` at these places."""
    for place, content in zip(held, arrays, strict=True):
        place.array = content


@contextmanager
def holding(held: Collection[Place], arrays: Sequence[mx.array]) -> Iterator[None]:
    """Within the context, these places hold `arrays` instead of their own."""
    before = arrays_at(held)
    try:
        put(held, arrays)
        yield
    finally:
        put(held, before)


def at(tree: Any, path: str) -> Any:
    """Return the node at a dotted path of a tree or module; the tree itself for an empty one."""
    for name in path.split(".") if path else ():
        tree = tree[int(name) if isinstance(tree, list | tuple) else name]
    return tree


def parted(joined: mx.array, shapes: Sequence[Sequence[int]]) -> list[mx.array]:
    """Return arrays of these shapes, which stand end to end in `joined`; they share its buffer."""
    ends = list(accumulate(map(math.prod, shapes)))[:-1]
    return [part.reshape(shape) for part, shape in zip(mx.split(joined, ends), shapes, strict=True)]


# The dtypes of numbers of four bytes.
_FOUR_BYTES = {np.dtype(np.int32): mx.int32, np.dtype(np.float32): mx.float32}


def from_host(*arrays: np.ndarray) -> list[mx.array]:
    """Convert arrays, in one copy where they have one shape: MLX on CUDA takes half a millisecond for each copy."""
    kinds = {array.dtype for array in arrays}
    if len({array.shape for array in arrays}) > 1 or not kinds <= _FOUR_BYTES.keys():
        return [mx.array(array) for array in arrays]
    joined = mx.array(np.stack([np.ascontiguousarray(array).view(np.int32) for array in arrays]))
    # joined[i] is a gather, for which MLX builds a kernel on CUDA.
    parts = mx.split(joined, len(arrays))
    return [part.squeeze(0).view(_FOUR_BYTES[array.dtype]) for part, array in zip(parts, arrays, strict=True)]


def iteration_key(seed: int, iteration: int, rank: int) -> mx.array:
    """Make a random key of these three numbers, so that dropout depends on nothing else and no key must be saved."""
    drawn = np.random.SeedSequence([seed % 2**64, iteration, rank]).generate_state(1, np.uint64)
    return mx.random.key(int(drawn[0]))


def number(scalar: mx.array) -> float:
    """Return the value of a scalar array; this waits until it is computed."""
    return float(scalar.item())  # type: ignore[arg-type]
