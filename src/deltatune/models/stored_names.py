"""From a model's parameters back to the tensors of its files, through mlx-lm's `sanitize` run backwards.

`sanitize` renames, transposes, stacks, splits, and shifts norms by one: it is affine, and its linear part only moves
elements. So its inverse, where there is one, is the transpose of its linear part, which mx.vjp gives. Each result is
run forward again and compared, and what does not come back is refused.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import UserError
from .checkpoint_files import WEIGHTS


class StoredNames:
    """The tensors that a checkpoint's files hold, and what `model.sanitize` makes of them. Reads no values yet."""

    def __init__(self, model: nn.Module, path: Path):
        self._sanitize = model.sanitize if hasattr(model, "sanitize") else dict
        self._path = path
        self._stored: dict[str, mx.array] = {}
        for file in sorted(path.glob(WEIGHTS)):
            self._stored.update(mx.load(str(file)))  # type: ignore[arg-type]
        self._seen = self._sanitize(dict(self._stored))
        origin = {id(array): name for name, array in self._stored.items()}
        # An array that comes out as the very object that went in was renamed at most.
        self._renamed = {name: origin[id(array)] for name, array in self._seen.items() if id(array) in origin}

    def write_back(self, new: dict[str, mx.array], gone: list[str]) -> dict[str, mx.array | None]:
        """{name in the files: new value, or None where removed} for new values of model parameters."""
        changes: dict[str, mx.array | None] = {}
        for name in gone:
            changes[self._known(name)] = None
        for name, value in new.items():
            if name in self._renamed:
                changes[self._renamed[name]] = value
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

    def _invert(self, name: str, value: mx.array, changes: dict[str, mx.array | None]) -> None:
        """Put `value` of the derived parameter `name` into the tensors that it was derived from."""
        sources = self._sources(name)
        zeros = [mx.zeros(self._stored[source].shape) for source in sources]

        def derive(*tensors: mx.array) -> mx.array:
            given = {**self._stored, **dict(zip(sources, tensors, strict=True))}
            return self._sanitize(given)[name].astype(mx.float32)

        offset = derive(*zeros)
        wanted = value.astype(mx.float32)
        _, values = mx.vjp(derive, zeros, [wanted - offset])
        _, counts = mx.vjp(derive, zeros, [mx.ones(value.shape)])
        results: list[mx.array] = []
        for source, put, count in zip(sources, values, counts, strict=True):
            old = changes.get(source)
            kept = self._stored[source] if old is None else old
            results.append(mx.where(count == 1, put.astype(kept.dtype), kept))
        error = mx.abs(derive(*(result.astype(mx.float32) for result in results)) - wanted)
        # Taking a shift off and putting it on again rounds once more; where there is none, nothing may change.
        slack = mx.where(offset == 0, 0, mx.finfo(self._stored[sources[0]].dtype).eps * (1 + mx.abs(wanted)))
        if not mx.all(error <= slack).item():
            raise self._one_way(name)
        changes.update(zip(sources, results, strict=True))

    def _sources(self, name: str) -> list[str]:
        """The stored tensors that a derived parameter is made of: each is numbered, and the numbers are looked up."""
        names = list(self._stored)
        numbered = {n: mx.full(self._stored[n].shape, float(i + 1)) for i, n in enumerate(names)}
        zeros = {n: mx.zeros(self._stored[n].shape) for n in names}
        numbers = self._sanitize(numbered)[name] - self._sanitize(zeros)[name]
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
    """The values in an array that is constant in large parts, cheaply."""
    low, high = array.min().item(), array.max().item()
    if low == high:
        return {float(low)}  # type: ignore[arg-type]
    if array.ndim > 2:
        return set().union(*(_distinct(array[index]) for index in range(array.shape[0])))
    return set(np.unique(np.array(array.astype(mx.float32))).tolist())
