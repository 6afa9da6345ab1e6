"""Small parameters end to end: one array each for the optimizer and for casts, parts of it for the model.

An adapter is hundreds of small arrays, and AdamW a dozen operations for each: on a GPU thousands of launches a step,
more than the model's own. End to end they are one array, updated by the same operations, to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers
from mlx.utils import tree_unflatten

from ..machine import backend
from ..ops.pointwise import joining
from .tree import leaves

# Of the numbers in a bundle: what is queued holds it some twenty times. A larger array goes by itself. Launches are
# what costs on a GPU; a CPU has few to save.
MOST, MOST_ON_CPU = 2**18, 2**16
# Where a tree has its bundles, beside what goes by itself.
TOGETHER = "together"

# Those that treat every number by itself; for others every array goes by itself.
ELEMENTWISE = ("SGD", "RMSprop", "Adagrad", "AdaDelta", "Adam", "AdamW", "Adamax", "Lion")


@dataclass
class Bundle:
    """Paths and shapes of the leaves, in order, and the dtype that the model multiplies with (None: their own)."""

    paths: list[str]
    shapes: list[tuple[int, ...]]
    used_as: mx.Dtype | None

    def join(self, flat: Mapping[str, mx.array]) -> mx.array:
        """The leaves of `flat`, by path, end to end."""
        return _end_to_end([flat[path] for path in self.paths])

    def part(self, joined: mx.array) -> list[mx.array]:
        """The leaves, which share the buffer of `joined`."""
        ends, end = [], 0
        for shape in self.shapes[:-1]:
            end += math.prod(shape)
            ends.append(end)
        return [piece.reshape(shape) for piece, shape in zip(mx.split(joined, ends), self.shapes, strict=True)]

    def used(self, joined: mx.array) -> list[mx.array]:
        """The leaves as the model uses them; their gradients arrive end to end, in the dtype of `joined`."""

        def forward(joined: mx.array) -> list[mx.array]:
            return self.part(joined if self.used_as is None else joined.astype(self.used_as))

        def backward(primal: mx.array, cotangents: Sequence[mx.array], _: Any) -> mx.array:
            return joining.end_to_end(cotangents).astype(primal.dtype)

        function: Any = mx.custom_function(forward)
        function.vjp(backward)
        return function(joined)


class Bundles:
    """Which leaves of a tree like `parameters` go together; those at `separate` do not. used_as: dtypes by path."""

    def __init__(
        self,
        parameters: Any,
        optimizer: mlx.optimizers.Optimizer,
        separate: Collection[str] = (),
        used_as: Mapping[str, mx.Dtype] | None = None,
    ):
        self.all: list[Bundle] = []
        most = MOST_ON_CPU if backend.device() == "cpu" else MOST
        kinds: dict[tuple[mx.Dtype, mx.Dtype | None], tuple[Bundle, int]] = {}
        for path, leaf in leaves(parameters) if type(optimizer).__name__ in ELEMENTWISE else []:
            if path in separate or leaf.size > most:
                continue
            kind = leaf.dtype, (used_as or {}).get(path)
            bundle, room = kinds.get(kind, (None, 0))
            if bundle is None or leaf.size > room:
                bundle, room = Bundle([], [], kind[1]), most
                self.all.append(bundle)
            bundle.paths.append(path)
            bundle.shapes.append(tuple(leaf.shape))
            kinds[kind] = bundle, room - leaf.size
        self.members = {path for bundle in self.all for path in bundle.paths}

    def join(self, tree: Any, joined: Sequence[mx.array] | None = None) -> Any:
        """The tree with its bundles in place of their leaves; `joined`: the bundles, if they are at hand."""
        flat = dict(leaves(tree))
        rest = [(path, leaf) for path, leaf in flat.items() if path not in self.members]
        together = [bundle.join(flat) for bundle in self.all] if joined is None else list(joined)
        found: Any = tree_unflatten(rest) if rest else {}
        return found | {TOGETHER: together} if together else found

    def part(self, tree: Any, used: bool = False) -> Any:
        """The tree that join() was given, without a copy; `used`: as the model uses it in a step."""
        rest = [(path, leaf) for path, leaf in leaves(tree) if not path.startswith(f"{TOGETHER}.")]
        for bundle, joined in zip(self.all, tree.get(TOGETHER, []), strict=True):
            rest += zip(bundle.paths, bundle.used(joined) if used else bundle.part(joined), strict=True)
        return tree_unflatten(rest)

    def part_state(self, state: Any) -> Any:
        """An optimizer's state with moments by the path of their parameter: as a run keeps it, on whatever device."""
        found = [(path, leaf) for path, leaf in leaves(state) if not path.startswith(f"{TOGETHER}.")]
        for bundle, moments in zip(self.all, state.get(TOGETHER, []), strict=True):
            for name, joined in moments.items():
                found += zip((f"{path}.{name}" for path in bundle.paths), bundle.part(joined), strict=True)
        return tree_unflatten(found)

    def join_state(self, parted: Any, like: Any) -> Any:
        """The state, shaped as `like`, of which part_state() made `parted`."""
        flat = dict(leaves(parted))
        found = [(path, flat[path]) for path, _ in leaves(like) if not path.startswith(f"{TOGETHER}.")]
        for number, (bundle, moments) in enumerate(zip(self.all, like.get(TOGETHER, []), strict=True)):
            for name in moments:
                joined = _end_to_end([flat[f"{path}.{name}"] for path in bundle.paths])
                found.append((f"{TOGETHER}.{number}.{name}", joined))
        return tree_unflatten(found)


def _end_to_end(arrays: Sequence[mx.array]) -> mx.array:
    return mx.concatenate([array.reshape(-1) for array in arrays])
