"""Reads a stream a window of rows at a time, and decides its order: each window is shuffled and cut by itself.

The order depends on the data, the options and the seed alone. A continued run reads the window again in which it
stopped, so the state holds its place in the data, and no examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import UserError
from ..example import Example, Splits
from ..rows.sources import JsonLines, Place, StreamedDataset
from .batch import Batch, bucket_widths
from .order import AnsweredOrder, BatchOrder

Encode = Callable[[list[tuple[str, object]], str], list[Example]]


@dataclass(frozen=True)
class Window:
    """The examples of `rows` consecutive rows, none where all rows were too long and left out.

    The rows begin at `place`, and the next window at `after`; None, the beginning, follows the last row.
    """

    examples: Sequence[Example]
    place: Place
    after: Place
    rows: int


@dataclass
class ExampleStream:
    """The training examples of a stream: `encode` turns `rows` of its rows at a time, each with its name, into
    examples.
    """

    source: JsonLines | StreamedDataset
    encode: Encode
    rows: int

    def window(self, place: Place) -> Window:
        """Read the window at a place; UserError where a row cannot be read or trained on."""
        rows, after = self.source.read(place, self.rows)
        if not rows and place is not None:
            # The data ended with the window before this one.
            place = None
            rows, after = self.source.read(None, self.rows)
        if not rows:
            raise UserError(f"{self.source.name}: no row in it; expected rows to train on.")
        name = f"{self.source.name} (the {len(rows):,} rows from {rows[0][0]})"
        return Window(self.encode(rows, name), place, after if len(rows) == self.rows else None, len(rows))


@dataclass(frozen=True)
class StreamedSplits(Splits):
    """The examples of a run with streamed training data; `train` has those of the `first` window, already read."""

    stream: ExampleStream = field(kw_only=True)
    first: Window = field(kw_only=True)


class StreamOrder:
    """An endless iterator of batches from a stream, one window after the other; the data starts again at its end.

    `order` makes the BatchOrder of a window's examples, for this rank, so that rows are sorted by padded width, packed
    and shared between ranks in the same way. Every rank reads the whole stream.
    """

    def __init__(
        self,
        stream: ExampleStream,
        first: Window,
        order: Callable[[Sequence[Example]], BatchOrder],
        max_seq_length: int,
    ):
        self._stream = stream
        self._order_of = order
        self._max_seq_length = max_seq_length
        self._begin(first, 0, 0, order(first.examples))

    @property
    def widths(self) -> list[int]:
        """The widths T that a batch can have, ascending; which of them will come is not known."""
        return bucket_widths(self._max_seq_length)

    @property
    def longest(self) -> int:
        """The width of the longest document by itself, as far as it is known."""
        return self._max_seq_length

    @property
    def slots(self) -> int:
        """The most documents of a row in the present window."""
        return self._order.slots

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._advanced())

    def next_examples(self) -> list[Example]:
        """Return this rank's documents of the next batch, in the place of the batch."""
        return self._advanced().next_examples()

    def batch_of(self, documents: Sequence[Example]) -> Batch:
        """Build this rank's batch from other documents, as AnsweredOrder does."""
        assert isinstance(self._order, AnsweredOrder)
        return self._order.batch_of(documents)

    def _advanced(self) -> BatchOrder:
        """Return the order of the window that holds the next batch, which is counted."""
        if self._step >= self._order.batches_per_epoch:
            self._next_window()
        self._step += 1
        return self._order

    def state(self) -> dict[str, Any]:
        """Return the place in the data, as JSON values from which `restore` continues with the same batches."""
        return {
            "epoch": self._epoch,
            "window": self._number,
            "step": self._step,
            "place": self._window.place,
            "window data": self._order.digest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the place that `state()` returned; UserError where the rows there have changed."""
        window = self._window
        if (self._number, window.place) != (state["window"], state["place"]):
            window = self._stream.window(state["place"])
        order = self._order_of(window.examples) if window.examples else None
        if order is None or order.digest != state["window data"]:
            raise UserError(
                f"resume: {self._stream.source.name} has other rows where the run stopped than it had there, so the "
                "run cannot go on; give the same data, or start anew without --resume."
            )
        self._begin(window, state["window"], state["epoch"], order, state["step"])

    def _next_window(self) -> None:
        number, epoch, window = self._number, self._epoch, self._window
        while number == self._number or not window.examples:
            window = self._stream.window(window.after)
            number = number + 1
            epoch = epoch + (window.place is None)
        self._begin(window, number, epoch, self._order_of(window.examples))

    def _begin(self, window: Window, number: int, epoch: int, order: BatchOrder, step: int = 0) -> None:
        """Continue with a window, the `number`th from 0, behind so many of its batches; `epoch` counts the data."""
        self._window = window
        self._number = number
        self._epoch = epoch
        self._order = order
        order.restore({**order.state(), "epoch": number, "step": step})
        self._step = step
