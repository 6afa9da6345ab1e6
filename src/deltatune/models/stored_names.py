"""From a model's parameters back to the tensors of its files, through mlx-lm's `sanitize` run backwards.

`sanitize` renames, transposes, stacks, splits, and shifts norms by one: it is affine, and its linear part only moves
elements. So its inverse, where there is one, is the transpose of its linear part, which mx.vjp gives. Each result is
run forward again and compared, and what does not come back is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import UserError
from .checkpoint_files import WEIGHTS

Sanitize = Callable[[dict[str, mx.array]], dict[str, mx.array]]

# Below this, fp32 holds every whole number, and adding one to it is exact.
_LARGEST_WHOLE = 2**23


class StoredNames:
    """The tensors that a checkpoint's files hold, and what `model.sanitize` makes of them. Reads no values yet."""

    def __init__(self, model: nn.Module, path: Path, sanitize: Sanitize | None = None):
        self._sanitize: Sanitize = sanitize or (model.sanitize if hasattr(model, "sanitize") else dict)
        self._path = path
        self._stored: dict[str, mx.array] = {}
        for file in sorted(path.glob(WEIGHTS)):
            self._stored.update(mx.load(str(file)))  # type: ignore[arg-type]
        self._seen = self._sanitize(dict(self._stored))
        origin = {id(array): name for name, array in self._stored.items()}
        # An array that comes out as the very object that went in was renamed at most.
        self._renamed = {name: origin[id(array)] for name, array in self._seen.items() if id(array) in origin}
        self._numbered = self._of_constants(range(1, len(self._stored) + 1))
        self._offset = self._of_constants([0] * len(self._stored))

    def write_back(self, new: dict[str, mx.array], gone: list[str]) -> dict[str, mx.array | None]:
        """{name in the files: new value, or None where removed} for new values of model parameters."""
        changes: dict[str, mx.array | None] = {}
        for name in gone:
            changes[self._known(name)] = None
        for name, value in new.items():
            if name in self._renamed:
                stored = self._renamed[name]
                dtype = self._stored[stored].dtype
                changes[stored] = value.astype(dtype) if mx.issubdtype(dtype, mx.floating) else value
            elif name in self._seen:
                self._invert(name, value, changes)
            else:
                self._known(name)
        return changes

    def _known(self, name: str) -> str:
        if name in self._renamed:
            return self._renamed[name]
        raise UserError(
            f"{self._path}: {name} is not stored as such in this checkpoint (quantised by another tool?), so the merge "
            "cannot be written back to it. Convert it with mlx_lm.convert first, or merge with mlx_lm.fuse."
        )

    def _of_constants(self, values: Iterable[int]) -> dict[str, mx.array]:
        """What `sanitize` makes of tensors that hold one number each."""
        pairs = zip(self._stored.items(), values, strict=True)
        return self._sanitize({n: mx.broadcast_to(mx.array(float(v)), t.shape) for (n, t), v in pairs})

    def _invert(self, name: str, value: mx.array, changes: dict[str, mx.array | None]) -> None:
        """Put `value` of the derived parameter `name` into the tensors that it was derived from."""
        offset = self._offset.pop(name)
        sources = self._sources(self._numbered.pop(name) - offset, name)
        values = [self._stored[source] if (old := changes.get(source)) is None else old for source in sources]

        def derive(*tensors: mx.array) -> mx.array:
            given = {**self._stored, **dict(zip(sources, tensors, strict=True))}
            return self._sanitize(given)[name].astype(mx.float32)

        def undo(array: mx.array) -> list[mx.array]:
            return mx.vjp(derive, [mx.zeros(tensor.shape) for tensor in values], [array])[1]

        # Whether elements come back to where they were is a matter of the map alone, so it is tried on numbers.
        trial = (mx.arange(value.size) % _LARGEST_WHOLE).astype(mx.float32).reshape(value.shape)
        if not mx.array_equal(derive(*undo(trial)) - offset, trial).item():
            raise self._one_way(name)
        whole = [mx.all(count == 1).item() for count in undo(mx.ones(value.shape))]
        results = zip(
            sources, undo(value.astype(mx.float32) - offset), undo(mx.ones(value.shape)), whole, values, strict=True
        )
        for source, put, count, all_of_it, old in results:
            put = put.astype(old.dtype)
            changes[source] = put if all_of_it else mx.where(count == 1, put, old)

    def _sources(self, numbers: mx.array, name: str) -> list[str]:
        """The stored tensors that a derived parameter is made of, by the numbers that stand where their values go."""
        names = list(self._stored)
        found = sorted(_distinct(numbers) - {0.0})
        if any(number not in range(1, len(names) + 1) for number in found):
            raise self._one_way(name)
        return [names[int(number) - 1] for number in found]

    def _one_way(self, name: str) -> UserError:
        return UserError(
            f"{self._path}: {name} is derived from the stored tensors in a way that cannot be undone, so a merge "
            "cannot be written back to this checkpoint. Convert it with mlx_lm.convert first."
        )


def _distinct(array: mx.array) -> set[float]:
    """The values in an array that is constant in large parts, such as one expert after another, cheaply."""
    axes = tuple(range(1, array.ndim))
    low, high = array.min(axis=axes), array.max(axis=axes)
    mx.eval(low, high)
    values = set(np.array(low).tolist())
    for row in np.flatnonzero(np.array(low != high)):
        values |= set(np.unique(np.array(array[int(row)])).tolist())
    return values
