"""Decides the order of training: a sequence of batches that depends on the data, the options and the seed alone."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from ...errors import UserError
from ..example import Example
from ..preferences.preference import SLOTS, Preference, lay_out
from .batch import Batch, bucket_widths, collate, pack

Row = tuple[int, ...]
# The entry of a saved place that tells one set of examples from another.
_DIGEST = "training data"


@dataclass(eq=False)
class BatchOrder:
    """An endless iterator of batches, one epoch after the other.

    Each epoch shuffles the rows by (seed, epoch), sorts them by padded width with a stable sort, cuts them into batches
    and shuffles the batches. No row is dropped: if the rows do not fill whole batches, blank rows of weight 0 complete
    the batch with the shortest rows: its shape is compiled in any case. The batches are the same for any `world`; rank
    r gets the rows r, r + world, r + 2 world and so on of each. Documents are packed once, by their lengths and their
    order in `examples`: those that share a row share it in every epoch, and the seed does not matter.

    Preferences of two documents each are ordered in the same way. One takes two rows of a batch, or room for both
    documents in a packed row.

    Args:
        examples: The documents, or preferences.
        batch_size: The rows of a batch, summed over all ranks; without packing, the preferences of a batch.
        max_seq_length: The largest number of positions in a row.
        seed: The seed of the shuffles.
        packed: Whether a row holds several documents.
        rank: The number of this process, from 0.
        world: The number of processes.

    Attributes:
        slots: The most documents, or preferences, of a row.
        vision: The numbers of the model's vision tower; None for a model without one.

    Raises:
        UserError: There are no examples, or `batch_size` is not a multiple of `world`.
        ValueError: An example has more than `max_seq_length` positions.
    """

    examples: Sequence[Example | Preference]
    batch_size: int
    max_seq_length: int
    _: KW_ONLY
    seed: int = 0
    packed: bool = False
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.world:
            raise UserError(
                f"batch_size {self.batch_size}: expected a multiple of the number of workers, {self.world}, since each "
                f"takes its own rows; use {max(self.world, self.batch_size // self.world * self.world)}."
            )
        if not self.examples:
            raise UserError("no examples: there is nothing to make batches from; give training data.")
        self._preferences = [example for example in self.examples if isinstance(example, Preference)]
        documents = (document for example in self.examples for document in example.documents)
        # A rank needs the numbers even if its share of a batch is blank.
        self.vision = next((document.pictures.spec for document in documents if document.pictures is not None), None)
        needed_by = sum if self.packed else max
        positions = [needed_by(document.positions for document in example.documents) for example in self.examples]
        self._rows: list[Row] = [(i,) for i in range(len(positions))]
        if self.packed:
            self._rows = pack(positions, self.max_seq_length)
        if self._preferences:
            self._rows = [row[at : at + SLOTS] for row in self._rows for at in range(0, len(row), SLOTS)]
        self.slots = max(map(len, self._rows))
        needed = [sum(positions[number] for number in row) for row in self._rows]
        buckets = bucket_widths(self.max_seq_length)
        if max(needed) > buckets[-1]:
            longest = max(self.examples, key=lambda example: example.positions)
            raise ValueError(
                f"{longest.source}: {longest.positions:,} positions, max_seq_length is {self.max_seq_length:,}."
            )
        self._widths = np.array([buckets[bisect_left(buckets, size)] for size in needed])
        self._digest: str | None = None
        self._epoch = 0
        self._step = 0
        self._plan = self._epoch_plan(0)

    @property
    def rows(self) -> int:
        """The number of rows in an epoch: one for each example, or fewer if rows are packed."""
        return len(self._rows)

    @property
    def batches_per_epoch(self) -> int:
        return -(-len(self._rows) // self.batch_size)

    @property
    def widths(self) -> list[int]:
        """The widths T that a batch can have, ascending."""
        return sorted({int(width) for width in self._widths})

    @property
    def longest(self) -> int:
        """The width of the longest document by itself."""
        return self.widths[-1]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._batch(self._next_rows())

    def next_examples(self) -> list[Example]:
        """Return this rank's documents of the next batch, in the place of the batch."""
        return self._documents(self._next_rows())

    def _documents(self, rows: list[int]) -> list[Example]:
        """Return this rank's documents of the rows of a batch."""
        share = rows[self.rank :: self.world]
        return [document for row in share for number in self._rows[row] for document in self.examples[number].documents]

    def _next_rows(self) -> list[int]:
        if self._step >= len(self._plan):
            self._epoch = self._epoch + 1
            self._step = 0
            self._plan = self._epoch_plan(self._epoch)
        self._step += 1
        return self._plan[self._step - 1]

    def epoch(self, number: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of one epoch, for evaluation; the endless iteration stays where it is."""
        return (self._batch(rows) for rows in self._epoch_plan(number))

    def epoch_examples(self) -> Iterator[list[Example]]:
        """Iterate over this rank's documents of each batch of epoch(), in the place of the batches."""
        return map(self._documents, self._epoch_plan(0))

    def state(self) -> dict[str, Any]:
        """Return the place in the data, as JSON values from which `restore` continues with the same batches."""
        return {"epoch": self._epoch, "step": self._step, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the place that `state()` returned; UserError where that belongs to other data or options."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                what = f"{name} was {state.get(name)!r} when the state was saved and is {value!r} now"
                if name == _DIGEST:
                    what = "the training data are not those that the state was saved with"
                raise UserError(
                    f"resume: {what}, so the run cannot go on where it stopped; give the same data and options, or "
                    "start anew without --resume."
                )
        self._epoch = int(state["epoch"])
        self._step = int(state["step"])
        self._plan = self._epoch_plan(self._epoch)

    def _identity(self) -> dict[str, Any]:
        """Return the options and the digest of the data on which the order depends."""
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "max_seq_length": self.max_seq_length,
            "pack": self.packed,
            "examples": len(self.examples),
            _DIGEST: self.digest,
        }

    @property
    def digest(self) -> str:
        """A digest of the examples."""
        if self._digest is None:
            digest = hashlib.blake2b(digest_size=16)
            for example in (document for example_row in self.examples for document in example_row.documents):
                digest.update(example.positions.to_bytes(8, "little"))
                digest.update(example.tokens.tobytes())
                digest.update(example.targets.tobytes())
                digest.update(example.beside)
                for picture in example.pictures.digests if example.pictures is not None else ():
                    digest.update(picture)
            digest.update(bytes(preference.desirable for preference in self._preferences))
            self._digest = digest.hexdigest()
        return self._digest

    def _epoch_plan(self, epoch: int) -> list[list[int]]:
        """Return the row numbers of each batch of the epoch; one batch may be incomplete."""
        random = np.random.default_rng([self.seed % 2**64, epoch])
        order = random.permutation(len(self._rows))
        order = order[np.argsort(self._widths[order], kind="stable")]
        first = len(order) % self.batch_size
        cuts = range(first, len(order), self.batch_size)
        batches = [order[cut : cut + self.batch_size].tolist() for cut in cuts]
        if first:
            batches.append(order[:first].tolist())
        return [batches[index] for index in random.permutation(len(batches))]

    def _batch(self, rows: list[int]) -> Batch:
        """Build the batch of these rows, of which this rank takes its share."""
        width = int(self._widths[rows].max())
        filled: list[Row] = [self._rows[row] for row in rows] + [()] * (self.batch_size - len(rows))
        share = filled[self.rank :: self.world]
        if not self._preferences:
            rows_of_one = [[self.examples[number] for number in row] for row in share]
            return self._collated(rows_of_one, width)  # type: ignore[arg-type]
        documents, preferences = lay_out(share, self._preferences, self.slots, width, packed=self.packed)
        return replace(self._collated(documents, width), preferences=preferences)

    def _collated(self, rows: Sequence[Sequence[Example]], width: int) -> Batch:
        return collate(rows, width, packed=self.packed, vision=self.vision)


class AnsweredOrder(BatchOrder):
    """A BatchOrder in which other answers, of up to `answer` tokens, may stand in the place of the examples' own."""

    def __init__(self, *of_order: Any, answer: int, **options: Any):
        super().__init__(*of_order, **options)
        documents = (document for example in self.examples for document in example.documents)
        prompt = max(len(document.prompt.tokens) for document in documents)
        self._longest = self._bucket(min(prompt + answer - 1, self.max_seq_length))

    @property
    def widths(self) -> list[int]:
        # Documents with other answers fill packed rows otherwise.
        return sorted({*super().widths, self.max_seq_length if self.packed else self._longest})

    @property
    def longest(self) -> int:
        return self._longest

    def _bucket(self, positions: int) -> int:
        buckets = bucket_widths(self.max_seq_length)
        return buckets[bisect_left(buckets, positions)]

    def batch_of(self, documents: Sequence[Example]) -> Batch:
        """Build this rank's batch from other documents; the last ones are left out where packed rows lack room."""
        rows = self.batch_size // self.world
        width = self.max_seq_length
        shared: list[Row] = [(at,) for at in range(len(documents))]
        if self.packed:
            positions = [document.positions for document in documents]
            counts = range(len(documents) + 1)
            fitting = bisect_right(counts, rows, key=lambda count: len(pack(positions[:count], width))) - 1
            shared = pack(positions[:fitting], width)
        filled = [[documents[at] for at in row] for row in shared]
        needed = max((sum(document.positions for document in row) for row in filled), default=1)
        return self._collated([*filled, *[[]] * (rows - len(filled))], self._bucket(needed))


class TrainingOrder:
    """An endless iterator of training batches, with its place in the data.

    `figures` are the names of the figures beside a batch.
    """

    figures: tuple[str, ...] = ()

    def __next__(self) -> Batch:
        raise NotImplementedError

    def peek(self) -> Batch | None:
        """Return the next batch ahead of time; None where it depends on the present update, or cannot be read."""
        return None

    def samples(self) -> list[dict[str, str]]:
        """Return some of the answers that the model sampled for the last batches, where it samples any."""
        return []

    def state(self) -> dict[str, Any]:
        """Return the place before the next batch, as JSON values."""
        raise NotImplementedError

    def arrays(self, _state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays that are needed to continue from `state`, which state() returned, beside the data."""
        return {}

    def restore(self, state: dict[str, Any], arrays: Mapping[str, Any]) -> None:
        """Continue from a state and its arrays."""
        raise NotImplementedError


class PeekableOrder(TrainingOrder):
    """Hands out the batches of `order`, of data in memory or of a stream, and can show the next one early.

    state() is then still the one before it.
    """

    def __init__(self, order: Any):
        self._order = order
        self._next: Batch | Exception | None = None
        self._before: dict[str, Any] = {}

    def peek(self) -> Batch | None:
        if self._next is None:
            self._before = self._order.state()
            try:
                self._next = next(self._order)
            except Exception as error:  # noqa: BLE001  (__next__ raises it)
                self._next = error
        return None if isinstance(self._next, Exception) else self._next

    def __next__(self) -> Batch:
        peeked = self._next
        self._next = None
        if isinstance(peeked, Exception):
            raise peeked
        return next(self._order) if peeked is None else peeked

    def state(self) -> dict[str, Any]:
        return self._order.state() if self._next is None else self._before

    def restore(self, state: dict[str, Any], _arrays: Mapping[str, Any]) -> None:
        self._next = None
        self._order.restore(state)
