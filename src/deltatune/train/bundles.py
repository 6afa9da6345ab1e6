"""Small parameters put end to end for their update, where the optimizer treats every number by itself.

An adapter is hundreds of small arrays, and AdamW a dozen operations for each: on a GPU thousands of launches a step,
more than the model's own. End to end they are one array, updated by the same operations, to the same bits. The
optimizer keeps its moments so; parameters are parts of one buffer, in their own shapes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx
import mlx.optimizers
from mlx.utils import tree_unflatten

from .tree import leaves

# Of the numbers in a bundle: an update holds a bundle's a dozen times. A larger array goes by itself.
MOST = 2**18
# Where a tree has its bundles, beside what goes by itself.
TOGETHER = "together"

ELEMENTWISE = ("SGD", "RMSprop", "Adagrad", "AdaDelta", "Adam", "AdamW", "Adamax", "Lion")


class Bundles:
    """Which leaves of a tree like `parameters` go together; those at `apart` do not."""

    def __init__(self, parameters: Any, optimizer: mlx.optimizers.Optimizer, apart: Collection[str] = ()):
        self._groups: list[list[tuple[str, tuple[int, ...]]]] = []
        room, dtype = 0, None
        for path, leaf in leaves(parameters) if type(optimizer).__name__ in ELEMENTWISE else []:
            if path in apart or leaf.size > MOST:
                continue
            if leaf.size > room or leaf.dtype != dtype:
                self._groups.append([])
                room, dtype = MOST, leaf.dtype
            self._groups[-1].append((path, tuple(leaf.shape)))
            room -= leaf.size
        self._member = {path for group in self._groups for path, _ in group}

    def paths(self) -> list[list[str]]:
        """The leaves of every bundle."""
        return [[path for path, _ in group] for group in self._groups]

    def join(self, tree: Any) -> Any:
        """The tree with its bundles in place of their leaves."""
        flat = dict(leaves(tree))
        rest = [(path, leaf) for path, leaf in flat.items() if path not in self._member]
        bundles = [_end_to_end([flat[path] for path, _ in group]) for group in self._groups]
        joined: Any = tree_unflatten(rest) if rest else {}
        return joined | {TOGETHER: bundles} if bundles else joined

    def part(self, tree: Any) -> Any:
        """The tree that join() was given, without a copy."""
        rest = [(path, leaf) for path, leaf in leaves(tree) if not path.startswith(f"{TOGETHER}.")]
        for group, flat in zip(self._groups, tree.get(TOGETHER, []), strict=True):
            rest += zip((path for path, _ in group), _parts(flat, [shape for _, shape in group]), strict=True)
        return tree_unflatten(rest)


def _end_to_end(arrays: Sequence[mx.array]) -> mx.array:
    return mx.concatenate([array.reshape(-1) for array in arrays])


def _parts(flat: mx.array, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    ends, end = [], 0
    for shape in shapes[:-1]:
        end += math.prod(shape)
        ends.append(end)
    return [part.reshape(shape) for part, shape in zip(mx.split(flat, ends), shapes, strict=True)]
