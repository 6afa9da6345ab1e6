"""Builds the graphs of a training step as the trainer does, without evaluating them, and simulates them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..data import Batch
from ..data.batches.batch import RolloutBatch
from ..data.preferences.preference import PreferenceBatch
from ..machine import backend
from ..models.head import split_head
from ..models.vision.inputs import ImageShapes, blank_vision_batch
from ..models.vision.split import FrozenTower, vision_spec
from ..ops.functional import modes_kept
from ..ops.recomputation import Checkpoints
from ..ops.tracing import trace
from ..options.config import TrainConfig
from ..train.batch_loss import Arrays, LossFunction, arrays
from ..train.by_layer.layer_step import step_of
from ..train.distillation import teacher_of
from ..train.distributed import World
from ..train.policy_loss import needs_old
from ..train.setup import Training, build_step, training
from ..train.step import Step, Sums
from ..train.tree import leaves
from ..train.updates.optimizer import build_optimizer
from .array_layout import ArrayLayout
from .graph import Node, all_nodes, evaluation_order, read
from .simulate import PACES, Amount, Simulation
from .traced_layers import InputsPlace, noted_passes, parts_read

_WIDTH = "MLX_BFS_MAX_WIDTH"


@dataclass
class Phase:
    """One evaluation within a step: the outputs of its graph, and the order of its primitives.

    `dropped` holds addresses of leaves that nothing but the graph refers to.
    """

    outputs: list[Node]
    order: list[Node]
    dropped: list[int] = field(default_factory=list)


@dataclass
class TracedStep:
    """A step that was built and not run: its evaluations, and the arrays `held` before it.

    `shared_buffers` are addresses of parameters that share one buffer, group by group, and `names` those of parameters
    by address. `forward` has the nodes of the forward pass, and so many primitives come before the update. `arrays` are
    those behind the nodes, since an address is valid only while its array exists. A vision tower that does not train
    runs before the step, one frame at a time, with `tower_reads` as inputs. `layer_inputs` are the bytes of inputs that
    a step by layers keeps between its passes.
    """

    phases: list[Phase]
    held: list[Node]
    shared_buffers: list[list[int]]
    names: dict[int, str]
    forward: set[Node]
    update_from: int
    before: Before
    arrays: list[mx.array]
    tower: Phase | None = None
    tower_reads: list[Node] = field(default_factory=list)
    layer_inputs: int = 0


@dataclass(frozen=True)
class BatchShape:
    """The shape of a batch: so many rows of so many tokens, with images or preferences."""

    rows: int
    length: int
    images: ImageShapes | None = None
    preferences: int = 0


def blank_batch(rows: int, length: int, packed: bool, preferences: int = 0) -> Batch:
    """A batch of this shape and arbitrary content, with that many preferences."""
    shape = (rows, length)
    segments = np.zeros(shape, np.int32) if packed else None
    ones = np.ones(shape, np.float32)
    blank = np.zeros(shape, np.int32)
    nothing = ((),) * rows
    held = None
    if preferences:
        one = np.ones(preferences, np.float32)
        two = np.ones((preferences, 2), np.float32)
        held = PreferenceBatch(blank, np.zeros(preferences, np.int32), one, one, two, two, two)
    return Batch(blank, blank, ones, segments, nothing, nothing, preferences=held)


def blank_rollouts(rows: int, length: int, config: TrainConfig) -> RolloutBatch:
    """The arrays of sampled answers in a batch of this shape, of arbitrary content."""
    figures = np.ones((2, 1), np.float32)
    if config.loss == "distill":
        return RolloutBatch(figures, teacher=None if config.memory is None else _hidden(config, rows, length))
    ones = np.ones((rows, length), np.float32)
    old = ones if needs_old(config) else None
    reference = ones if config.beta else None
    return RolloutBatch(figures, ones, ones, ones[0, 0], old, reference)


def _hidden(config: TrainConfig, rows: int, length: int) -> mx.array:
    """The hidden states of a teacher that runs before the step."""
    backbone = split_head(teacher_of(config), compare=False).backbone
    assert backbone is not None
    like = backbone(mx.zeros((1, 1), mx.int32))
    return mx.zeros((rows, length, like.shape[-1]), like.dtype)


class Before(NamedTuple):
    """The arrays that exist before a step: their memory, and the number and bytes of parameters, gradients, moments."""

    held: Amount
    counts: dict[str, int]
    sizes: dict[str, int]


class _Start(NamedTuple):
    """A step that was not traced yet; `arrays` with these `nodes` exist before it, in buffers that some share."""

    step: Step
    sums: Sums
    moments: list[mx.array]
    arrays: list[mx.array]
    nodes: list[Node]
    shared_buffers: list[list[int]]
    before: Before


def _start(
    model: nn.Module,
    config: TrainConfig,
    layout: ArrayLayout,
    loss: LossFunction,
    teacher: nn.Module | None,
    kind: Callable[..., Step] = Step,
) -> _Start:
    step = build_step(model, build_optimizer(config), loss, config, World(), kind)
    sums = Sums(step.zeros(), mx.array(0.0), mx.array(0.0))
    moments = _leaves(step.optimizer.state)
    arrays = [*_leaves(model.state), *step.joined, *moments, *_leaves(sums), *step.random]
    if teacher is not None and config.memory is None:
        arrays += _leaves(teacher.state)
    shared_buffers = _shared_buffers(step, model, layout)
    machine = Simulation(backend.here(PACES))
    nodes = read(layout, arrays, _addresses(layout, arrays))
    machine.add_leaves(nodes, shared_buffers)
    parameters = _leaves(model.parameters())
    groups = {"parameters": parameters, "gradients": _leaves(step.parameters()), "moments": moments}
    counts = {name: len(arrays) for name, arrays in groups.items()}
    counts["parameters"] -= sum(len(group) - 2 for group in shared_buffers)
    sizes = {name: sum(array.nbytes for array in arrays) for name, arrays in groups.items()}
    before = Before(Amount(machine.live_bytes, machine.live), counts, sizes)
    return _Start(step, sums, moments, arrays, nodes, shared_buffers, before)


def before_step(model: nn.Module, config: TrainConfig, layout: ArrayLayout) -> Before:
    """Return the arrays that exist before a step, which is not traced and so needs no loss."""
    teacher = teacher_of(config) if config.loss == "distill" else None
    return _start(model, config, layout, lambda *_: (), teacher).before


def trace_step(
    model: nn.Module,
    config: TrainConfig,
    shape: BatchShape,
    layout: ArrayLayout,
    checkpoints: Checkpoints | None = None,
    *,
    layer_inputs: InputsPlace | None = None,
    inner: Collection[int] | None = None,
) -> TracedStep:
    """Build the graphs of one training iteration of the prepared `model` on a batch, which leaves it unchanged.

    `checkpoints` and `layer_inputs` are as in forecast_step(). `inner` leaves out most turns of long loops, and most
    pieces of the layers at these positions.
    UserError where options of `config` conflict.
    """
    as_trained = _as_trained(model, config, checkpoints)
    with as_trained as trained, noted_passes(model, trained, layer_inputs) as traced:
        start = _start(model, config, layout, trained.loss, trained.teacher, step_of(traced.passes))
        step = start.step
        before = _leaves(model.trainable_parameters())
        names = {layout.address(array): name for name, array in leaves(model.parameters())}
        blank = blank_batch(shape.rows, shape.length, config.pack, shape.preferences)
        if config.samples_answers or (config.loss == "distill" and config.memory is not None):
            blank = dataclasses.replace(blank, rollouts=blank_rollouts(shape.rows, shape.length, config))
        batch, features = blank_arrays(model, step.tower, blank, shape.images)
        inner_layers = [trained.layers[at].module for at in inner or ()]
        with trace.having(shortened=inner is not None, inner_layers=inner_layers):
            first, second, gradients = _outputs(step, start.sums, batch)
        existing = _addresses(layout, start.arrays)
        # One evaluation of a step as a whole, many of one by layers.
        phases = _phases(layout, [*traced.noted, first], existing)
        graphs = [node for phase in phases for node in all_nodes(phase.outputs)]
        evaluated = existing | {node.address for node in graphs}
        # Nodes without a kind pass through unchanged.
        update_nodes = [node for node in read(layout, second, evaluated) if node.kind]
        sources = _constants(all_nodes(read(layout, _leaves(batch), existing)), existing)
        known = {node.address for node in [*sources, *(node for node in graphs if node.kind)]}
        held = [*start.nodes, *sources]
        held += _constants(graphs, existing | known) + _constants(all_nodes(update_nodes), evaluated)
        # The trainer refers to neither sums nor batch, so they live only until the last graph has read them.
        phases[-1].dropped += [*_addresses(layout, _leaves(start.sums)), *(node.address for node in sources)]
        forward = _forward(phases, layout.address(first[0]))
        update_from = sum(len(phase.order) for phase in phases)
        replaced = [*before, *step.joined, *start.moments, *_leaves(gradients)]
        staying = _addresses(layout, second)
        phases.append(_phase(update_nodes, [at for at in _addresses(layout, replaced) if at not in staying]))
        tower, tower_reads = _tower_phase(layout, features, existing)
    referenced = [*start.arrays, *first, *second, *_leaves(batch), *features]
    return TracedStep(
        phases, held, start.shared_buffers, names, forward, update_from, start.before, referenced, tower, tower_reads,
        traced.inputs.bytes,
    )  # fmt: skip


def _outputs(step: Step, sums: Sums, batch: Any) -> tuple[list[mx.array], list[mx.array], Any]:
    """Trace one iteration; return the outputs of its first evaluation and of its update, and the gradients."""
    lengths = None if step.routers is None else mx.zeros(len(batch.inputs), mx.int32)
    loss, weight, gradients, figures = step.on_arrays(batch, sums.gradients, lengths)
    new = step.sum_over_ranks(Sums(gradients, sums.loss + loss, sums.weight + weight), figures)
    first = [loss, weight, *figures, *_leaves(new)]
    norm = step.update(*new)
    return first, [*_leaves(step.parameters()), *_leaves(step.optimizer.state), norm], gradients


def _forward(phases: Sequence[Phase], loss: int) -> set[Node]:
    """The nodes that are evaluated before the loss at an address, or that it depends on."""
    forward: set[Node] = set()
    for phase in phases:
        of_loss = [node for node in phase.outputs if node.address == loss]
        forward |= set(all_nodes(of_loss or phase.outputs))
        if of_loss:
            break
    return forward


def _phases(layout: ArrayLayout, noted: Sequence[Sequence[mx.array]], existing: set[int]) -> list[Phase]:
    return [_phase(*part) for part in zip(*parts_read(layout, noted, existing), strict=True)]


def _phase(outputs: list[Node], dropped: list[int]) -> Phase:
    """The evaluation of `outputs`; nothing but the graph refers to the arrays at the addresses `dropped`."""
    return Phase(outputs, evaluation_order(outputs, int(os.environ.get(_WIDTH, "20"))), dropped)


def _addresses(layout: ArrayLayout, arrays: Sequence[mx.array]) -> set[int]:
    return {layout.address(array) for array in arrays}


def _shared_buffers(step: Step, model: nn.Module, layout: ArrayLayout) -> list[list[int]]:
    """For each bundle of parameters, the addresses of the bundle and of its parts."""
    at = {path: layout.address(array) for path, array in leaves(model.trainable_parameters())}
    pairs = zip(step.joined, step.bundles.all, strict=True)
    return [[layout.address(joined), *(at[path] for path in bundle.paths)] for joined, bundle in pairs]


def blank_arrays(
    model: nn.Module, tower: FrozenTower | None, blank: Batch, shapes: ImageShapes | None
) -> tuple[Arrays, list[mx.array]]:
    """The batch's arrays, with images of `shapes`, and a frozen tower's features of one."""
    features: list[mx.array] = []
    if shapes is not None:
        rows, length = blank.inputs.shape
        images = blank_vision_batch(rows, length, shapes[:2], vision_spec(model))
        blank = dataclasses.replace(blank, images=images)
        blank.weights.reshape(-1)[: shapes.uncounted] = 0
        if tower is not None and shapes.frames:
            features = tower.frame_features(images, 0, shapes.patches)
    return arrays(blank, tower and (lambda images: _blank_features(features, len(images.patches)))), features


def _tower_phase(layout: ArrayLayout, features: list[mx.array], existing: set[int]) -> tuple[Phase | None, list[Node]]:
    """The evaluation of a vision tower before the step, and the nodes that it reads other than parameters."""
    if not features:
        return None, []
    outputs = read(layout, features, existing)
    reads = [node for node in all_nodes(outputs) if not node.kind and node.address not in existing]
    return _phase(outputs, [node.address for node in reads]), reads


def _blank_features(features: list[mx.array], frames: int) -> dict[str, Any]:
    """The blank features of `frames` frames, of a tower that made `features` of one frame."""
    if not features:
        return {}
    blank = [mx.zeros((frames * len(feature), feature.shape[1]), feature.dtype) for feature in features]
    mx.eval(blank)
    return {"features": blank[0], "deep": blank[1:]}


def _leaves(tree: Any) -> list[mx.array]:
    return [array for _, array in leaves(tree) if isinstance(array, mx.array)]


def _constants(nodes: Sequence[Node], others: set[int]) -> list[Node]:
    """Constants inside the graphs, mostly scalars, which the compiled functions hold."""
    return [node for node in nodes if not node.kind and node.address not in others]


@contextlib.contextmanager
def _as_trained(model: nn.Module, config: TrainConfig, checkpoints: Checkpoints | None) -> Iterator[Training]:
    """Yield setup.training()'s result; within it the model is as Trainer has it, and afterwards it is as before."""
    parameters = model.trainable_parameters()
    with modes_kept(model), training(model, config, compare=False, checkpoints=checkpoints) as trained:
        model.train()
        try:
            yield trained
        finally:
            model.update(parameters)


def simulate_tower(built: TracedStep) -> Simulation | None:
    """The simulated run of the vision tower on one frame; None where no tower runs before the step."""
    if built.tower is None:
        return None
    return _simulated([*built.held, *built.tower_reads], [built.tower], built.shared_buffers)


def simulate_forward(
    layout: ArrayLayout, inputs: Any, noted: Sequence[Sequence[mx.array]], brake: int | None = None
) -> Simulation:
    """The simulated evaluations, one after another, of arrays that were not computed, from the arrays in `inputs`.

    Results of the last evaluation, and those that a later one reads, stay alive. `brake` is MLX's memory limit.
    """
    held = [array for _, array in leaves(inputs) if isinstance(array, mx.array)]
    existing = _addresses(layout, held)
    phases = _phases(layout, noted, existing)
    nodes = [node for phase in phases for node in all_nodes(phase.outputs)]
    made = {node.address for node in nodes if node.kind}
    return _simulated([*read(layout, held, existing), *_constants(nodes, existing | made)], phases, brake=brake)


def simulate_step(built: TracedStep, brake: int | None = None, *, queued: int = 0) -> Simulation:
    """The simulated run of the step at the pace of MLX's default device; the numbers are those of Simulation."""
    return _simulated(built.held, built.phases, built.shared_buffers, brake, queued)


def _simulated(
    held: Sequence[Node],
    phases: Sequence[Phase],
    shared_buffers: Sequence[Sequence[int]] = (),
    brake: int | None = None,
    queued: int = 0,
) -> Simulation:
    machine = Simulation(backend.here(PACES), brake, queued)
    machine.add_leaves(held, shared_buffers)
    for phase in phases:
        machine.evaluate(phase.order, phase.outputs, phase.dropped)
    return machine
