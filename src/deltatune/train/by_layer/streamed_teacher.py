"""Computes a teacher's hidden states before each step, where some of its layers stay on the disk or on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from ...data import Batch
from ...data.batches.batch import RolloutBatch
from ...models.head import split_head
from ...ops.segments import segments
from ...patches.whole_rows import whole_rows
from ..setup import Training
from .store import Store


@contextmanager
def streamed_teacher(trained: Training, weights: Store | None) -> Iterator[Training]:
    """Within the context, batches get the hidden states of the teacher; with `weights` None, the step computes them."""
    if weights is None:
        yield trained
        return
    assert trained.teacher is not None
    backbone = split_head(trained.teacher, compare=False).backbone
    assert backbone is not None
    calls = weights.calls()

    def taught(batch: Batch) -> Batch:
        packed = None if batch.segments is None else mx.array(batch.segments)
        with calls.watched(), segments(packed), whole_rows():
            hidden = backbone(mx.array(batch.inputs))
            mx.eval(hidden)
        beside = batch.rollouts or RolloutBatch()
        return dataclasses.replace(batch, rollouts=dataclasses.replace(beside, teacher=hidden))

    yield dataclasses.replace(trained, taught=taught)
