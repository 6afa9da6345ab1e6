"""Turns new values of a model's parameters into new values of the tensors in its checkpoint's files.

When a checkpoint is loaded, the model's `sanitize` method makes parameters of stored tensors. It renames, transposes,
stacks and splits them, and adds one to the weights of norms. So it is affine, and its linear part only moves elements.
The inverse of such a map, where there is one, is the transpose of its linear part, which mx.vjp computes. Each inverse
is verified by running `sanitize` on its results, and a parameter that does not come back is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import UserError
from .checkpoint_files import WEIGHTS

Sanitize = Callable[[dict[str, mx.array]], dict[str, mx.array]]

# fp32 represents every whole number up to this one exactly, and adding one to it is exact as well.
_LARGEST_WHOLE = 2**23


class StoredNames:
    """The tensors in a checkpoint's files, and the model's parameters that are made of them.

    No values are read before `write_back` needs them.

    Args:
        model: The model, whose `sanitize` method is used if it has one.
        path: The checkpoint folder.
        sanitize: Takes the place of `model.sanitize`. It must not change the tensors that it is given.
    """

    def __init__(self, model: nn.Module, path: Path, sanitize: Sanitize | None = None):
        self._sanitize: Sanitize = sanitize or (_repeatable(model) if hasattr(model, "sanitize") else dict)
        self._path = path
        self._stored: dict[str, mx.array] = {}
        for file in sorted(path.glob(WEIGHTS)):
            self._stored.update(mx.load(str(file)))  # type: ignore[arg-type]
        self._parameters = self._sanitize(dict(self._stored))
        origin = {id(array): name for name, array in self._stored.items()}
        # If sanitize returns the same object that it was given, it did no more than rename the tensor.
        self._stored_name = {name: origin[id(array)] for name, array in self._parameters.items() if id(array) in origin}
        # With tensors that hold their own number, the parameters show which tensors they are made of. With zeros, they
        # show the constants that sanitize adds.
        self._numbers = self._sanitize_constants(range(1, len(self._stored) + 1))
        self._offsets = self._sanitize_constants([0] * len(self._stored))

    def write_back(self, new: dict[str, mx.array], removed: list[str]) -> dict[str, mx.array | None]:
        """Compute the changes to the files from changes to the model.

        Args:
            new: New values by the names of the model's parameters.
            removed: The names of parameters that the model no longer has.

        Returns:
            {name of a tensor in the files: its new value, or None to remove it}.

        Raises:
            UserError: A parameter is not made of the stored tensors in a way that can be undone.
        """
        changes: dict[str, mx.array | None] = {}
        for name in removed:
            changes[self._name_in_files(name)] = None
        for name, value in new.items():
            if name in self._stored_name:
                stored = self._stored_name[name]
                dtype = self._stored[stored].dtype
                changes[stored] = value.astype(dtype) if mx.issubdtype(dtype, mx.floating) else value
            elif name in self._parameters:
                self._invert(name, value, changes)
            else:
                self._name_in_files(name)
        return changes

    def _name_in_files(self, name: str) -> str:
        """The stored tensor that the parameter `name` is. UserError where it is none of them."""
        if name in self._stored_name:
            return self._stored_name[name]
        raise UserError(
            f"{self._path}: no tensor of this checkpoint holds {name} (perhaps another tool quantised it), so the "
            "merge cannot be written back to it. Convert it with mlx_lm.convert first, or merge with mlx_lm.fuse."
        )

    def _sanitize_constants(self, values: Iterable[int]) -> dict[str, mx.array]:
        """The parameters that `sanitize` makes if each stored tensor holds one of `values` in every element."""
        pairs = zip(self._stored.items(), values, strict=True)
        constants = {n: mx.broadcast_to(mx.array(float(v)), t.shape) for (n, t), v in pairs}
        try:
            return self._sanitize(constants)
        except ValueError as error:
            raise UserError(
                f"the tensors of this model cannot be written back: mlx-lm checks their values ({error})."
            ) from error

    def _invert(self, name: str, value: mx.array, changes: dict[str, mx.array | None]) -> None:
        """Add to `changes` the stored tensors from which the parameter `name` gets the new `value`."""
        offset = self._offsets.pop(name)
        sources = self._sources(self._numbers.pop(name) - offset, name)
        values = [self._stored[source] if (old := changes.get(source)) is None else old for source in sources]

        def derive(*tensors: mx.array) -> mx.array:
            given = {**self._stored, **dict(zip(sources, tensors, strict=True))}
            return self._sanitize(given)[name].astype(mx.float32)

        def undo(array: mx.array) -> list[mx.array]:
            return mx.vjp(derive, [mx.zeros(tensor.shape) for tensor in values], [array])[1]

        # Whether an element returns to its place does not depend on values, so the check uses distinct numbers.
        trial = (mx.arange(value.size) % _LARGEST_WHOLE).astype(mx.float32).reshape(value.shape)
        if not mx.array_equal(derive(*undo(trial)) - offset, trial).item():
            raise self._irreversible(name)
        # `count` is 1 where an element of the stored tensor goes into this parameter; other elements keep their values.
        # It is built a second time for the results, which thereby stay lazy and take no memory.
        complete = [mx.all(count == 1).item() for count in undo(mx.ones(value.shape))]
        results, counts = undo(value.astype(mx.float32) - offset), undo(mx.ones(value.shape))
        for source, result, count, is_complete, old in zip(sources, results, counts, complete, values, strict=True):
            result = result.astype(old.dtype)
            changes[source] = result if is_complete else mx.where(count == 1, result, old)

    def _sources(self, numbers: mx.array, name: str) -> list[str]:
        """The stored tensors that a parameter is made of, given `numbers` in the place of their values."""
        names = list(self._stored)
        used = sorted(_distinct(numbers) - {0.0})
        if any(number not in range(1, len(names) + 1) for number in used):
            raise self._irreversible(name)
        return [names[int(number) - 1] for number in used]

    def _irreversible(self, name: str) -> UserError:
        return UserError(
            f"{self._path}: {name} is derived from the stored tensors in a way that cannot be undone, so a merge "
            "cannot be written back to this checkpoint. Convert it with mlx_lm.convert first."
        )


def _repeatable(model: nn.Module) -> Sanitize:
    """The model's `sanitize` as a function to call any number of times.

    Gemma 3's removes the output head, where it is tied, from the model itself, and a second call would not find it.
    """

    def sanitize(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        stand_in: Any = copy.copy(model)
        stand_in.setdefault("lm_head", None)
        return stand_in.sanitize(tensors)

    return sanitize


def _distinct(array: mx.array) -> set[float]:
    """The values in an array. Fast where most entries of the first axis hold one value each, as stacked experts do."""
    axes = tuple(range(1, array.ndim))
    low, high = array.min(axis=axes), array.max(axis=axes)
    mx.eval(low, high)
    values = set(np.array(low).tolist())
    for row in np.flatnonzero(np.array(low != high)):
        values |= set(np.unique(np.array(array[int(row)])).tolist())
    return values
