"""Which examples are trained on when: a sequence of batches that depends on the data, the seed and nothing else."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import UserError
from .batch import Batch, bucket_widths, collate
from .example import Example
from .packing import pack

Row = tuple[int, ...]


class BatchOrder:
    """An endless iterator of `Batch`, epoch after epoch.

    Each epoch shuffles the rows by (seed, epoch), sorts them by padded width (a stable sort, so equals stay shuffled),
    cuts them into batches of `batch_size` and shuffles the batches. No row is dropped: where the rows do not fill
    whole batches, the epoch's batch of shortest rows is completed with blank rows of weight 0, so that its shape is one
    that is compiled anyway. The batches are the same for any `world`; rank r gets the rows r, r + world, ... of each.

    examples: the documents. batch_size: rows of a batch over all ranks. packed: several documents to a row of
    `max_seq_length` positions. UserError where `batch_size` is no multiple of `world`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        max_seq_length: int,
        *,
        seed: int = 0,
        packed: bool = False,
        rank: int = 0,
        world: int = 1,
    ):
        if batch_size < 1 or batch_size % world:
            raise UserError(
                f"batch_size {batch_size}: expected a multiple of the number of workers, {world}, since each takes its "
                f"own rows; use {max(world, batch_size // world * world)}."
            )
        if not examples:
            raise UserError("no examples: nothing to make batches from.")
        self._examples = examples
        self._batch_size, self._seed, self._packed = batch_size, seed, packed
        self._max_seq_length, self._rank, self._world = max_seq_length, rank, world
        positions = [example.positions for example in examples]
        self._rows: list[Row] = pack(positions, max_seq_length) if packed else [(i,) for i in range(len(examples))]
        needed = [sum(positions[number] for number in row) for row in self._rows]
        buckets = bucket_widths(max_seq_length)
        if max(needed) > buckets[-1]:
            longest = max(examples, key=lambda example: example.positions)
            raise ValueError(f"{longest.source}: {longest.positions} positions, max_seq_length is {max_seq_length}.")
        self._widths = np.array([buckets[bisect_left(buckets, size)] for size in needed])
        self._digest: str | None = None
        self._epoch, self._step = 0, 0
        self._plan = self._epoch_plan(0)

    @property
    def rows(self) -> int:
        """Rows of an epoch: examples, or packed rows."""
        return len(self._rows)

    @property
    def batches_per_epoch(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    @property
    def epoch_number(self) -> int:
        """The epoch, from 0, to which the next batch belongs."""
        return self._epoch + (self._step >= len(self._plan))

    @property
    def widths(self) -> list[int]:
        """Every batch width T that can occur, ascending."""
        return sorted({int(width) for width in self._widths})

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._step >= len(self._plan):
            self._epoch, self._step = self._epoch + 1, 0
            self._plan = self._epoch_plan(self._epoch)
        self._step += 1
        return self._batch(self._plan[self._step - 1])

    def epoch(self, number: int = 0) -> Iterator[Batch]:
        """One pass over every row, for evaluation; the place of the endless iteration does not move."""
        return (self._batch(rows) for rows in self._epoch_plan(number))

    def state(self) -> dict[str, Any]:
        """The place in the data, as JSON values: restored in a BatchOrder of the same data, the rest is the same."""
        return {"epoch": self._epoch, "step": self._step, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the batch that `state` was taken after. UserError where data or options are not the same."""
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise UserError(
                    f"resume: {name} was {state.get(name)!r} when the state was saved and is {mine!r} now, so the run "
                    "cannot go on where it stopped; give the same data and options, or start anew without --resume."
                )
        self._epoch, self._step = int(state["epoch"]), int(state["step"])
        self._plan = self._epoch_plan(self._epoch)

    def _identity(self) -> dict[str, Any]:
        if self._digest is None:
            digest = hashlib.blake2b(digest_size=16)
            for example in self._examples:
                digest.update(example.positions.to_bytes(8, "little"))
                digest.update(example.tokens.tobytes())
                digest.update(example.targets.tobytes())
                for picture in example.pictures.digests if example.pictures is not None else ():
                    digest.update(picture)
            self._digest = digest.hexdigest()
        return {
            "seed": self._seed,
            "batch_size": self._batch_size,
            "max_seq_length": self._max_seq_length,
            "pack": self._packed,
            "examples": len(self._examples),
            "training data": self._digest,
        }

    def _epoch_plan(self, epoch: int) -> list[list[int]]:
        """The row numbers of every global batch of the epoch; the one incomplete batch has fewer."""
        random = np.random.default_rng([self._seed % 2**64, epoch])
        order = random.permutation(len(self._rows))
        order = order[np.argsort(self._widths[order], kind="stable")]
        first = len(order) % self._batch_size
        cuts = range(first, len(order), self._batch_size)
        batches = [order[cut : cut + self._batch_size].tolist() for cut in cuts]
        if first:
            batches.append(order[:first].tolist())
        return [batches[index] for index in random.permutation(len(batches))]

    def _batch(self, rows: list[int]) -> Batch:
        width = int(self._widths[rows].max())
        filled: list[Row] = [self._rows[row] for row in rows] + [()] * (self._batch_size - len(rows))
        mine = filled[self._rank :: self._world]
        return collate([[self._examples[number] for number in row] for row in mine], width, packed=self._packed)
