"""An order of training that gives the next batch ahead of time, while its place in the data stays before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .batch import Batch
from .order import BatchOrder
from .stream_order import StreamOrder


class PeekableOrder:
    """Hands out the batches of `order`, and can show the next one early: state() is then still the one before it."""

    def __init__(self, order: BatchOrder | StreamOrder):
        self._order = order
        self._next: Batch | Exception | None = None
        self._before: dict[str, Any] = {}

    def peek(self) -> Batch | None:
        """Return the next batch, or None if reading it raised an error, which __next__ raises when its turn comes."""
        if self._next is None:
            self._before = self._order.state()
            try:
                self._next = next(self._order)
            except Exception as error:  # noqa: BLE001  (__next__ raises it)
                self._next = error
        return None if isinstance(self._next, Exception) else self._next

    def __next__(self) -> Batch:
        peeked, self._next = self._next, None
        if isinstance(peeked, Exception):
            raise peeked
        return next(self._order) if peeked is None else peeked

    def state(self) -> dict[str, Any]:
        """Return the place in the data before the batch that comes next."""
        return self._order.state() if self._next is None else self._before

    def arrays(self, _state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays that the place needs: none, since the data hold all."""
        return {}

    def restore(self, state: dict[str, Any], _arrays: Mapping[str, Any]) -> None:
        """Continue from the place that state() returned."""
        self._next = None
        self._order.restore(state)
