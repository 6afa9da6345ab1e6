"""Facts about arrays: the origin of an array, or results that were already computed from it.

A function that is handed an array sees its values alone. Where it could do better if it knew the array's origin, the
function that made the array notes a fact. Each kind of fact is a class of its own, beside the functions that note it
and ask for it.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import mlx.core as mx

Fact = TypeVar("Fact")


class Known:
    """Facts about arrays, by the identity of the array. A fact is forgotten with its array.

    A fact must not hold its own array, which would then live for as long as this mapping.
    """

    def __init__(self) -> None:
        self._facts: dict[type, dict[int, tuple[weakref.ref[mx.array], Any]]] = {}

    def note(self, array: mx.array, fact: object) -> None:
        """Note a fact about an array, in the place of an earlier fact of the same class."""
        of_kind = self._facts.setdefault(type(fact), {})
        key = id(array)
        # The fact goes before another array can get the same id.
        of_kind[key] = weakref.ref(array, lambda _: of_kind.pop(key, None)), fact

    def of(self, array: mx.array, kind: type[Fact]) -> Fact | None:
        """Return the fact of this class about this very array; None if there is none."""
        return _about(array, self._facts.get(kind))

    def take(self, array: mx.array, kind: type[Fact]) -> Fact | None:
        """Return the fact of this class about this very array, and forget all facts of this class."""
        # Decoders ask at every layer, and there are mostly none.
        facts = self._facts.pop(kind, None)
        return _about(array, facts) if facts else None

    def forget(self, kind: type) -> None:
        """Forget all facts of this class."""
        self._facts.pop(kind, None)

    def __len__(self) -> int:
        """Return the number of facts."""
        return sum(map(len, self._facts.values()))


def _about(array: mx.array, facts: dict[int, tuple[weakref.ref[mx.array], Any]] | None) -> Any:
    noted = facts.get(id(array)) if facts else None
    return noted[1] if noted else None
