"""Joins small parameters end to end into bundles, so that the optimizer and casts work on one array.

An adapter consists of hundreds of small arrays, and AdamW runs a dozen operations on each. On a GPU these are thousands
of kernel launches a step, more than the model's own. A bundle is updated by the same operations in one launch each, and
gives the same bits. The model uses parts of the bundle. train/step.py joins and parts the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.optimizers
from mlx.utils import tree_unflatten

from ...machine import backend
from ...ops.pointwise import joining
from ...ops.pointwise.stored_moments import BLOCK
from ..tree import leaves, parted
from .optimizer import SMALLEST, EightBit

# The most numbers in a bundle; a larger array stays separate. The limit exists because queued work holds about twenty
# copies of a bundle. It is lower on a CPU, which gains less from fewer launches. On an NVIDIA GPU one kernel updates a
# bundle, so that there are fewer copies, and a bundle has at most as many members as one launch joins.
MOST_NUMBERS = {"cpu": 2**16, "metal": 2**18, "cuda": 2**21}
# The key under which a joined tree holds its bundles, beside the separate arrays.
TOGETHER = "together"

# The optimizers that treat every number independently. Those that store moments in 8 bits treat blocks so; with any
# other optimizer, no arrays are joined.
ELEMENTWISE = ("SGD", "RMSprop", "Adagrad", "AdaDelta", "Adam", "AdamW", "Adamax", "Lion")


@dataclass
class Bundle:
    """The layout of one bundle: the paths and shapes of its parameters in order, and whether they decay."""

    paths: list[str]
    shapes: list[tuple[int, ...]]
    # The dtype in which the model uses the parameters; None for the dtype of the bundle.
    used_as: mx.Dtype | None
    decays: bool

    def join(self, flat: Mapping[str, mx.array]) -> mx.array:
        """Concatenate the bundle's parameters, which `flat` holds by path, into an array of one axis."""
        return _end_to_end([flat[path] for path in self.paths])

    def part(self, joined: mx.array) -> list[mx.array]:
        """Return the parameters as parts of `joined`; they share its buffer."""
        return parted(joined, self.shapes)

    def part_moment(self, joined: mx.array) -> list[mx.array]:
        """Return the parameters' parts of a moment, or of the scales of a moment that is stored in 8 bits."""
        sizes = [math.prod(shape) for shape in self.shapes]
        if joined.size == sum(sizes):
            return self.part(joined)
        return list(mx.split(joined, [end // BLOCK for end in accumulate(sizes)][:-1]))

    def used(self, joined: mx.array) -> list[mx.array]:
        """Return the parameters in the dtype that the model uses."""
        return self.part(joined if self.used_as is None else joined.astype(self.used_as))


class Bundles:
    """Decides which parameters are joined, and converts trees between the two forms.

    A joined tree holds the bundles in a list under TOGETHER, and the remaining parameters at their own paths. Nothing
    is joined unless the optimizer is one of ELEMENTWISE, or stores moments in 8 bits. By path, `used_as` has the dtype
    in which the model uses a parameter where it is not its own; `undecayed` are the paths of the parameters without
    weight decay.
    """

    def __init__(
        self,
        parameters: Any,
        optimizer: mlx.optimizers.Optimizer,
        used_as: Mapping[str, mx.Dtype] | None = None,
        undecayed: Collection[str] = (),
    ):
        self.all: list[Bundle] = []
        self._undecayed = undecayed
        most = backend.here(MOST_NUMBERS)
        members = joining.MOST if joining.OPERATOR.is_for_here else math.inf
        kinds: dict[tuple[mx.Dtype, mx.Dtype | None, bool], tuple[Bundle, int]] = {}
        for path, leaf in leaves(parameters):
            if leaf.size > most or not _joins(leaf, optimizer):
                continue
            kind = leaf.dtype, (used_as or {}).get(path), path not in undecayed
            bundle, room = kinds.get(kind, (None, 0))
            if bundle is None or leaf.size > room or len(bundle.paths) >= members:
                bundle = Bundle([], [], *kind[1:])
                room = most
                self.all.append(bundle)
            bundle.paths.append(path)
            bundle.shapes.append(tuple(leaf.shape))
            kinds[kind] = bundle, room - leaf.size
        # A bundle of one parameter that the model uses as it is would only copy its gradient.
        self.all = [bundle for bundle in self.all if len(bundle.paths) > 1 or bundle.used_as is not None]
        # The paths of all parameters that are in a bundle.
        self.members = {path for bundle in self.all for path in bundle.paths}

    def decays(self, path: str) -> bool:
        """Return whether the parameters at a path of a joined tree decay."""
        bundle = path.removeprefix(f"{TOGETHER}.")
        return path not in self._undecayed if bundle == path else self.all[int(bundle)].decays

    def join(self, tree: Any, joined: Sequence[mx.array] | None = None) -> Any:
        """Return `tree` with bundles in place of their members; `joined` gives the bundles if they exist already."""
        flat = dict(leaves(tree))
        alone = [(path, leaf) for path, leaf in flat.items() if path not in self.members]
        together = [bundle.join(flat) for bundle in self.all] if joined is None else list(joined)
        separate: Any = tree_unflatten(alone) if alone else {}
        return separate | {TOGETHER: together} if together else separate

    def part(self, tree: Any, used: bool = False) -> Any:
        """Undo join() without a copy; with `used`, the parameters have the dtypes in which the model uses them."""
        members = [(path, leaf) for path, leaf in leaves(tree) if not path.startswith(f"{TOGETHER}.")]
        for bundle, joined in zip(self.all, tree.get(TOGETHER, []), strict=True):
            members += zip(bundle.paths, bundle.used(joined) if used else bundle.part(joined), strict=True)
        return tree_unflatten(members)

    def join_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Join the gradients of `part`'s parts of `parameters` with `used`, in the dtypes of `parameters`."""
        flat = dict(leaves(gradients))
        together = [
            joining.end_to_end([flat[path] for path in bundle.paths]).astype(joined.dtype)
            for bundle, joined in zip(self.all, parameters.get(TOGETHER, []), strict=True)
        ]
        return self.join(gradients, together)

    def part_state(self, state: Any) -> Any:
        """Return an optimizer's state with each moment at the path of its parameter, as a saved run holds it."""
        parted = [(path, leaf) for path, leaf in leaves(state) if not path.startswith(f"{TOGETHER}.")]
        for bundle, moments in zip(self.all, state.get(TOGETHER, []), strict=True):
            for name, joined in moments.items():
                parted += zip((f"{path}.{name}" for path in bundle.paths), bundle.part_moment(joined), strict=True)
        return tree_unflatten(parted)

    def join_state(self, parted: Any, like: Any) -> Any:
        """Undo part_state(): return the state `parted` with bundles, in the structure of `like`."""
        flat = dict(leaves(parted))
        state = [(path, flat[path]) for path, _ in leaves(like) if not path.startswith(f"{TOGETHER}.")]
        for number, (bundle, moments) in enumerate(zip(self.all, like.get(TOGETHER, []), strict=True)):
            for name in moments:
                joined = _end_to_end([flat[f"{path}.{name}"] for path in bundle.paths])
                state.append((f"{TOGETHER}.{number}.{name}", joined))
        return tree_unflatten(state)


def _end_to_end(arrays: Sequence[mx.array]) -> mx.array:
    return mx.concatenate([array.reshape(-1) for array in arrays])


def _joins(parameter: mx.array, optimizer: mlx.optimizers.Optimizer) -> bool:
    """Whether the optimizer makes the same step of a parameter and of its part of a bundle."""
    if isinstance(optimizer, EightBit):
        # Its moments are stored in 8 bits when it is alone, too, and no block has numbers of two parameters.
        return parameter.size >= SMALLEST and parameter.size % BLOCK == 0
    return type(optimizer).__name__ in ELEMENTWISE
