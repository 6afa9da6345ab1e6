"""Reads the training examples of a stream, a window of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...errors import UserError
from ..example import Example, Splits
from ..rows.row_streams import Place, RowStream

Encode = Callable[[list[tuple[str, object]], str], list[Example]]


@dataclass(frozen=True)
class Window:
    """The examples of some consecutive rows.

    Args:
        examples: The examples. There are none where all rows were too long and left out.
        place: Where its rows begin.
        after: Where the next window begins; None, the beginning, after the last row.
        rows: The number of its rows.
    """

    examples: Sequence[Example]
    place: Place
    after: Place
    rows: int


@dataclass
class ExampleStream:
    """The training examples of a stream.

    Args:
        source: The rows.
        encode: Turns rows, each with its name in messages, into examples.
        rows: The number of rows of a window.
    """

    source: RowStream
    encode: Encode
    rows: int

    def window(self, place: Place) -> Window:
        """Read the window at a place.

        Raises:
            UserError: A row cannot be read or trained on.
        """
        rows, after = self.source.read(place, self.rows)
        if not rows and place is not None:
            # The data ended with the window before this one.
            place, (rows, after) = None, self.source.read(None, self.rows)
        if not rows:
            raise UserError(f"{self.source.name}: no row in it; expected rows to train on.")
        name = f"{self.source.name} (the {len(rows):,} rows from {rows[0][0]})"
        return Window(self.encode(rows, name), place, after if len(rows) == self.rows else None, len(rows))


@dataclass(frozen=True)
class StreamedSplits(Splits):
    """The examples of a run with streamed training data; `train` has those of the first window.

    Args:
        stream: The training examples.
        first: The first window, which is read already.
    """

    stream: ExampleStream = field(kw_only=True)
    first: Window = field(kw_only=True)
