"""Small arrays of an update put end to end, for optimizers that treat every number by itself.

An adapter is hundreds of small arrays, and AdamW a dozen operations for each: on a GPU thousands of launches a step,
more than the model's own. End to end they are one array, updated by the same operations, to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers

# Of the numbers in a bundle: so much is there twice while it is updated. An array of more goes by itself.
MOST = 2**18

_ELEMENTWISE = tuple(
    getattr(mlx.optimizers, name)
    for name in ("SGD", "RMSprop", "Adagrad", "AdaDelta", "Adam", "AdamW", "Adamax", "Lion")
)


@dataclass(frozen=True)
class Leaf:
    """A parameter, its gradient, and the optimizer's state for it (in place)."""

    gradient: mx.array
    parameter: mx.array
    state: dict[str, mx.array]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the leaves of a bundle have in common."""
        dtypes = tuple((name, str(value.dtype)) for name, value in sorted(self.state.items()))
        return str(self.gradient.dtype), str(self.parameter.dtype), dtypes

    @property
    def numbers_apart(self) -> bool:
        """Whether the state has a number for each of the parameter's."""
        return all(value.shape == self.parameter.shape for value in self.state.values())


def bundled(optimizer: mlx.optimizers.Optimizer, leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    """`leaves`, in their order, cut into bundles; one each where the optimizer looks at more than single numbers."""
    bundles: list[list[Leaf]] = []
    room = 0
    for leaf in leaves:
        joins = bool(bundles) and leaf.kind == bundles[-1][0].kind and leaf.parameter.size <= room
        if joins and type(optimizer) in _ELEMENTWISE and leaf.numbers_apart:
            bundles[-1].append(leaf)
        else:
            bundles.append([leaf])
            room = MOST
        room -= leaf.parameter.size
    return bundles


def joined(arrays: Sequence[mx.array]) -> mx.array:
    """Arrays end to end; one alone as it is."""
    return arrays[0] if len(arrays) == 1 else mx.concatenate([array.reshape(-1) for array in arrays])


def parted(flat: mx.array, like: Sequence[mx.array]) -> list[mx.array]:
    """The parts of what joined() gave, in the shapes of `like`."""
    if len(like) == 1:
        return [flat]
    ends, end = [], 0
    for array in like[:-1]:
        end += math.prod(array.shape)
        ends.append(end)
    return [part.reshape(array.shape) for part, array in zip(mx.split(flat, ends), like, strict=True)]
