"""A frozen record that code reads without being given it, and its changes for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar

Record = TypeVar("Record")


class Context(Generic[Record]):
    """One record in force for each thread; `current` returns it.

    `fresh` makes the values of attributes that the outermost context begins with. `current` is the variable's own
    method, since decoders ask at every call.
    """

    def __init__(self, outside: Record, **fresh: Callable[[], Any]):
        self.outside = outside
        self.fresh = fresh
        self.variable: ContextVar[Record] = ContextVar(type(outside).__name__, default=outside)
        self.current: Callable[[], Record] = self.variable.get

    def having(self, **changes: Any) -> Changed[Record]:
        """Within the returned context the record has other values; TypeError for an attribute that it lacks."""
        if unknown := changes.keys() - vars(self.outside).keys():
            raise TypeError(f"a {type(self.outside).__name__} has no {', '.join(sorted(unknown))}.")
        return Changed(self, changes)


class Changed(Generic[Record]):
    """A context in which a record has other values."""

    def __init__(self, context: Context[Record], changes: dict[str, Any]):
        self._context = context
        self._changes = changes

    def __enter__(self) -> None:
        context = self._context
        outer = context.variable.get()
        fresh = {name: make() for name, make in context.fresh.items()} if outer is context.outside else {}
        inner = object.__new__(type(outer))
        # dataclasses.replace would take ten times as long; a block of experts opens a context for each token decoded.
        vars(inner).update(vars(outer), **(fresh | self._changes))
        self._token: Token[Record] = context.variable.set(inner)

    def __exit__(self, *_: object) -> None:
        self._context.variable.reset(self._token)
