"""Turns new values of a model's parameters into new values of the tensors in its checkpoint's files.

When a checkpoint is loaded, the model's `sanitize` method makes parameters of stored tensors. It renames, transposes,
stacks and splits them, adds one to the weights of norms, and multiplies them by numbers of the config. So it is affine,
and its linear part moves elements and multiplies each by a factor. The inverse of such a map, where there is one, is
the transpose of its linear part, which mx.vjp computes, divided by the squares of the factors. Each inverse is verified
by running `sanitize` on its results, and a parameter that does not come back is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import UserError
from ..lora.select import MTP
from ..machine.host_memory import as_numpy
from ..ops.functional import is_floating
from .adapted_base import head_sanitizer
from .checkpoint_files import weight_files
from .transformers_configs import with_joined_experts, with_released_names
from .vision.split import has_vision

Sanitize = Callable[[dict[str, mx.array]], dict[str, mx.array]]

# The base of the digits by which a trial tells elements apart. fp32 multiplies and divides them with errors under 0.5.
_DIGITS = 2**12


class _Origin(NamedTuple):
    """The origin of a parameter: the stored tensors by name, and the constant that `sanitize` adds to them."""

    sources: list[str]
    offset: mx.array
    # For each stored tensor, whether all of its elements go into this parameter.
    complete: list[bool]


class StoredNames:
    """The tensors in a checkpoint's files, and the model's parameters that are made of them by its `sanitize`, if it
    has one.

    No values are read before `write_back` needs them.
    """

    def __init__(self, model: nn.Module, path: Path):
        self._sanitize: Sanitize = _sanitize(model, path)
        self._path = path
        self._origins: dict[str, _Origin] = {}
        self._stored = _lazy_tensors(path)
        # Falcon-H1's sanitize multiplies in place, so it gets arrays of its own.
        handed = {name: copy.copy(array) for name, array in self._stored.items()}
        self._parameters = self._sanitize(dict(handed))
        origin = {id(array): name for name, array in handed.items()}
        # If sanitize returns the same object that it was given, it moved nothing.
        self._stored_name = {name: origin[id(array)] for name, array in self._parameters.items() if id(array) in origin}
        # With tensors that hold their own number, the parameters show which tensors they are made of. With zeros, they
        # show the constants that sanitize adds.
        self._number_of = {name: number for number, name in enumerate(self._stored, 1)}
        self._numbers = self._sanitize_constants(self._number_of.values())
        self._offsets = self._sanitize_constants([0] * len(self._stored))

    def write_back(self, new: dict[str, mx.array], removed: list[str]) -> dict[str, mx.array | None]:
        """Return the changes to the files, None to remove a tensor, from new values and removed names of the model's
        parameters.

        It may be called again with other values: how a parameter is made is examined only once. UserError for a
        parameter that is not made of the stored tensors in a way that can be undone.
        """
        changes: dict[str, mx.array | None] = {}
        for name in removed:
            changes[self._name_in_files(name)] = None
        for name, value in new.items():
            if self._is_renamed(name):
                stored = self._stored_name[name]
                dtype = self._stored[stored].dtype
                changes[stored] = value.astype(dtype) if mx.issubdtype(dtype, mx.floating) else value
            elif name in self._parameters:
                self._invert(name, value, changes)
            else:
                self._name_in_files(name)
        # A tensor that is read stays in memory as long as it is here, and the changes will read some.
        self._stored = _lazy_tensors(self._path)
        return changes

    def _is_renamed(self, name: str) -> bool:
        """Whether the parameter `name` is a stored tensor as it is."""
        stored = self._stored_name.get(name)
        if stored is None or name in self._origins:
            return False
        return bool(mx.all(self._numbers[name] == self._number_of[stored]).item())

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
        origin = self._origins.get(name)
        if origin is None:
            origin = self._origins[name] = self._examine(name, value)
        sources, offset, complete = origin
        values = [self._stored[source] if (old := changes.get(source)) is None else old for source in sources]
        # Elements that go into no parameter keep their values. The squares are built a second time for the results,
        # which thereby stay lazy and take no memory.
        results = self._inverse(name, sources, value.astype(mx.float32), offset)
        squares = self._squares(name, sources, offset)
        for source, result, square, is_complete, old in zip(sources, results, squares, complete, values, strict=True):
            result = result.astype(old.dtype)
            changes[source] = result if is_complete else mx.where(square > 0, result, old)

    def _examine(self, name: str, value: mx.array) -> _Origin:
        """Find the origin of the parameter `name`, of the shape of `value`; UserError if it has no inverse."""
        offset, numbers = self._offsets.pop(name), self._numbers.pop(name)
        stored = self._stored_name.get(name)
        sources = self._sources(numbers - offset, name) if stored is None else [stored]
        if not all(is_floating(self._stored[source]) for source in sources):
            raise self._irreversible(name)
        # Whether an element returns to its place does not depend on values, so the check uses two digits of its place.
        places = mx.arange(value.size).reshape(value.shape)
        for trial in (places % _DIGITS, places // _DIGITS % _DIGITS):
            returned = self._derive(name, sources, self._inverse(name, sources, trial + offset, offset))
            if not mx.array_equal(mx.round(returned - offset), trial).item():
                raise self._irreversible(name)
        complete = [bool(mx.all(square > 0).item()) for square in self._squares(name, sources, offset)]
        return _Origin(sources, offset, complete)

    def _inverse(self, name: str, sources: list[str], value: mx.array, offset: mx.array) -> list[mx.array]:
        """The stored tensors named `sources` of which `sanitize` makes `value`; zeros where it reads none of them."""
        undone = zip(self._undo(name, sources, value - offset), self._squares(name, sources, offset), strict=True)
        return [result / mx.where(square > 0, square, 1.0) for result, square in undone]

    def _squares(self, name: str, sources: list[str], offset: mx.array) -> list[mx.array]:
        """The square of the factor by which `sanitize` multiplies each element; 0 where it leaves one out."""
        ones = [mx.ones(self._stored[source].shape) for source in sources]
        return self._undo(name, sources, self._derive(name, sources, ones) - offset)

    def _derive(self, name: str, sources: list[str], tensors: list[mx.array]) -> mx.array:
        """The parameter `name` that `sanitize` makes if the stored tensors named `sources` are `tensors`."""
        tensors_by_name = {**self._stored, **dict(zip(sources, tensors, strict=True))}
        tensors_by_name = {stored: copy.copy(array) for stored, array in tensors_by_name.items()}
        return self._sanitize(tensors_by_name)[name].astype(mx.float32)

    def _undo(self, name: str, sources: list[str], array: mx.array) -> list[mx.array]:
        """The stored tensors named `sources` of which the linear part of `sanitize` makes `array`."""
        zeros = [mx.zeros(self._stored[source].shape) for source in sources]
        return mx.vjp(lambda *tensors: self._derive(name, sources, list(tensors)), zeros, [array])[1]

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


def stored_parameters(model: nn.Module, path: Path) -> dict[str, mx.array]:
    """Return the parameters that `model` makes of the tensors of its checkpoint's files, by name, lazily.

    No model is built for it. Changes that mlx-lm makes to tensors outside the model's own `sanitize` are missing.
    """
    return _sanitize(model, path)(_lazy_tensors(path))


def _lazy_tensors(path: Path) -> dict[str, mx.array]:
    stored: dict[str, mx.array] = {}
    for file in weight_files(path):
        stored.update(mx.load(str(file)))  # type: ignore[arg-type]
    return stored


def _sanitize(model: nn.Module, path: Path) -> Sanitize:
    """The function that makes the parameters of a model of stored tensors, to call any number of times.

    Some `sanitize` methods change the arrays that they are given.
    """
    parts = [model, model.vision_tower, model.language_model] if has_vision(model) else [model]
    parts = [part for part in parts if hasattr(part, "sanitize")]
    of_head = head_sanitizer(path) if MTP in model else lambda _: {}

    def sanitize(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        parameters = with_released_names(tensors) if parts else tensors
        for part in parts:
            # Gemma 3's removes the output head, where it is tied, from the model itself, and would miss it afterwards.
            stand_in: Any = copy.copy(part)
            stand_in.setdefault("lm_head", None)
            parameters = stand_in.sanitize(parameters)
        return {**(with_joined_experts(parameters) if parts else parameters), **of_head(tensors)}

    return sanitize


def _distinct(array: mx.array) -> set[float]:
    """The values in an array. Fast where most entries of the first axis hold one value each, as stacked experts do."""
    axes = tuple(range(1, array.ndim))
    low, high = array.min(axis=axes), array.max(axis=axes)
    mx.eval(low, high)
    values = set(as_numpy(low).tolist())
    for row in np.flatnonzero(as_numpy(low != high)):
        values |= set(np.unique(as_numpy(array[int(row)])).tolist())
    return values
