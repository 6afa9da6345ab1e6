"""Sets up a run with layers that may stay on the disk, its own frozen ones or a teacher's, and makes its step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...data import Batch
from ...data.batches.batch import RolloutBatch, row_capacity
from ...machine import backend
from ...models.document_isolation import check_packing
from ...models.head import split_head
from ...ops.segments import segments
from ...options.config import TrainConfig
from ...patches.whole_rows import whole_rows
from ..batch_loss import Arrays
from ..compiled import Compiled
from ..setup import Training, with_loss
from ..step import MicroBatch, Step, StepMachine
from .layer_calls import LayerCalls, passed_on
from .layer_passes import LayerPasses
from .store import Store

#: The freed memory that MLX may keep beside an NVIDIA GPU, where the driver counts it as taken. More saves no time by
#: layers (docs/decisions/larger-than-memory.md).
_KEPT = 2**28


class LayerStep(Step):
    """A training step that computes micro-batches by layers; they are done when micro_batch() returns."""

    def __init__(self, *of_step: Any, passes: LayerPasses, **options: Any):
        super().__init__(*of_step, **options)
        self._passes = passes
        self._add = Compiled(self.added, [])

    def on_arrays(self, batch: Arrays, accumulated: Any, lengths: mx.array | None = None) -> MicroBatch:
        parameters = self.parameters()
        used = self.bundles.part(parameters, used=True)
        loss, weight, gradients, *figures = self._passes.gradients(batch, used, self.random[0], self.routers, lengths)
        return MicroBatch(loss, weight, self._add(accumulated, gradients, weight, parameters), figures)


def step_of(passes: LayerPasses | None, machine: StepMachine | None = None) -> Callable[..., Step]:
    """Return the class of a run's step, for setup.build_step(): by layers, or whole and launched by a thread."""
    if passes is None:
        return partial(Step, machine=machine)
    return partial(LayerStep, passes=passes, machine=machine)


@contextmanager
def by_layers(
    model: nn.Module,
    config: TrainConfig,
    trained: Training,
    weights: Store | None,
    between: Callable[[], None] | None = None,
    feature_bytes: int = 0,
) -> Iterator[Training]:
    """Within the context, the layers of `model` read their weights from `weights` when they are called.

    Yield the set-up, which setup.training() has made without comparing the model's parts, with the passes of a step;
    a run without `weights` has all of them in memory, and keeps its set-up. `between` is called before each layer of a
    pass, and may leave the pass by an error. MLX gives freed memory back before it would hold more than the rest of
    `config.memory`, which `feature_bytes` of images' cached features share but beside an NVIDIA GPU.

    UserError where the layers cannot be computed one by one, or packed documents influence each other.
    """
    if weights is None:
        yield trained
        return
    if config.pack:
        check_packing(model, row_capacity(config))
    layers = [layer.module for layer in trained.layers]
    assert config.memory is not None
    features = 0 if backend.has_own_memory() else feature_bytes
    with ExitStack() as stack:
        stack.callback(mx.set_memory_limit, mx.set_memory_limit(config.memory - features + weights.on_host))
        if backend.has_own_memory():
            stack.callback(mx.set_cache_limit, mx.set_cache_limit(_KEPT))
        # The rest of the model runs without the weights of its layers.
        with LayerCalls(layers, passed_on).watched():
            compared = with_loss(model, config, True)
        passes = LayerPasses(model, compared.loss, weights, between=between)
        stack.enter_context(passes.served())
        passes.check(packed=config.pack)
        compiled = f"{trained.compiled}, one layer at a time"
        yield dataclasses.replace(
            compared, layers=trained.layers, patches=trained.patches, compiled=compiled, passes=passes
        )


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
