"""Builds a training step as the trainer does, without evaluating anything, and simulates it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..config import TrainConfig
from ..data import Batch
from ..machine import backend
from ..models.vision.inputs import ImageShapes, blank_vision_batch
from ..models.vision.split import vision_spec
from ..ops.random_state import get_key, set_key
from ..train.distributed import World
from ..train.expert_updates import ExpertGradients
from ..train.optimizer import build_optimizer
from ..train.setup import build_step, training
from ..train.step import Arrays, Step, Sums, arrays
from ..train.tree import leaves
from .array_layout import ArrayLayout
from .graph import Node, all_nodes, evaluation_order, read
from .simulate import PACES, Simulation

_WIDTH = "MLX_BFS_MAX_WIDTH"


@dataclass
class Phase:
    """One evaluation of a step: its graph's outputs, the order, and what nothing else refers to."""

    name: str
    outputs: list[Node]
    order: list[Node]
    dropped: list[int] = field(default_factory=list)
    # Values that are made while the graph is built, and that the graph alone refers to.
    made: list[Node] = field(default_factory=list)


@dataclass
class TracedStep:
    """A step that was built and not run. names: of parameters, by address; loss: the node of the loss."""

    phases: list[Phase]
    held: list[Node]
    # Parameters that are parts of one buffer, by address.
    together: list[list[int]]
    names: dict[int, str]
    loss: Node
    parameters: int
    gradients: int
    moments: int
    parameter_bytes: int
    gradient_bytes: int
    moment_bytes: int
    rows: int
    length: int
    # The arrays behind the nodes: addresses are theirs for as long as they exist.
    arrays: list[mx.array]
    # A tower that does not train runs by itself, on one frame after another, and what it reads.
    tower: Phase | None = None
    tower_reads: list[Node] = field(default_factory=list)


def blank_batch(rows: int, length: int, packed: bool) -> Batch:
    """A batch of that shape; what is in it does not matter."""
    shape = (rows, length)
    segments = np.zeros(shape, np.int32) if packed else None
    ones = np.ones(shape, np.float32)
    blank, nothing = np.zeros(shape, np.int32), ((),) * rows
    return Batch(blank, blank, ones, segments, nothing, nothing)


def build(
    model: nn.Module,
    config: TrainConfig,
    rows: int,
    length: int,
    layout: ArrayLayout,
    shapes: ImageShapes | None = None,
) -> TracedStep:
    """The graphs of one iteration of the prepared `model` on `rows` rows of `length` tokens, with images of `shapes`.

    The model comes out as it went in. Raises UserError for options that do not fit.
    """
    with _as_trained(model, config) as loss_function:
        optimizer = build_optimizer(config)
        step = build_step(model, optimizer, loss_function, config, World())
        # Copies, here and below: an update of experts writes new values into the arrays themselves.
        before, moments = _leaves(model.trainable_parameters()), _leaves(optimizer.state)
        sums = Sums(step.zeros(), mx.array(0.0), mx.array(0.0))
        names = {layout.address(array): name for name, array in leaves(model.parameters())}
        joined, together = step.joined, _together(step, model, layout)
        given = [*_leaves(model.state), *joined, *moments, *_leaves(sums), get_key()]

        batch, features = _batch(model, step, blank_batch(rows, length, config.pack), shapes)
        loss, weight, gradients = step.on_arrays(batch, sums.gradients)
        new = step.sum_over_ranks(Sums(gradients, sums.loss + loss, sums.weight + weight))
        first = [loss, weight, *_leaves(new)]
        norm, experts = step.begin_update(*new)
        second = [*_leaves(model.trainable_parameters()), *step.joined, *_leaves(optimizer.state), norm]
        second += _leaves(experts) if experts else []

        there = _addresses(layout, given)
        one = read(layout, first, there)
        evaluated = there | {node.address for node in all_nodes(one)}
        # Arrays that pass through unchanged are made by no phase.
        two = [node for node in read(layout, second, evaluated) if node.kind]
        data = there | _addresses(layout, _leaves(batch))
        held = read(layout, [*given, *_leaves(batch)], data) + _constants(one, data) + _constants(two, evaluated)
        # The trainer keeps neither: its arrays live until the graph has read them.
        gone = [layout.address(array) for array in [*_leaves(sums), *_leaves(batch)]]
        phases = [_phase("forward and backward", one, gone)]
        # Where experts wait, the trainer holds the gradients until the first evaluation of the update is done.
        given_up = [*before, *joined, *moments, *([] if experts else _leaves(gradients))]
        phases.append(_phase("update", two, _replaced(layout, given_up, second)))
        third: list[mx.array] = []
        if experts is not None:
            step.finish_update(experts._replace(touched=_every_expert(experts)))
            third = [*_leaves(model.trainable_parameters()), *_leaves(optimizer.state)]
            gone = _replaced(layout, [*second, *_leaves(gradients)], [*third, *step.joined, norm])
            evaluated |= _addresses(layout, second) | {node.address for node in all_nodes(two)}
            phases.append(_experts_phase(layout, third, evaluated, gone))
        tower, tower_reads = _tower_phase(layout, features, there)
    return TracedStep(
        phases, held, together, names, one[0], len(names) - sum(len(group) - 2 for group in together),
        len(_leaves(gradients)), len(moments),
        sum(array.nbytes for _, array in leaves(model.parameters())),
        sum(array.nbytes for array in _leaves(gradients)), sum(array.nbytes for array in moments),
        rows, length, [*given, *first, *second, *third, *_leaves(batch), *features],
        tower, tower_reads,
    )  # fmt: skip


def _phase(name: str, outputs: list[Node], gone: list[int]) -> Phase:
    """The evaluation of `outputs`, after which nothing holds the arrays at the addresses `gone`."""
    return Phase(name, outputs, evaluation_order(outputs, int(os.environ.get(_WIDTH, "20"))), gone)


def _experts_phase(layout: ArrayLayout, outputs: list[mx.array], values: set[int], gone: list[int]) -> Phase:
    """The update of experts by itself, after the other's evaluation."""
    nodes = read(layout, outputs, values)
    made = _constants(nodes, values)
    phase = _phase("update of experts", nodes, [*gone, *(node.address for node in made)])
    phase.made = made
    return phase


def _addresses(layout: ArrayLayout, arrays: Sequence[mx.array]) -> set[int]:
    return {layout.address(array) for array in arrays}


def _every_expert(experts: ExpertGradients) -> dict[str, Any]:
    """As if each expert had tokens: the most that an update of experts can need."""
    return {layer: np.ones(touched.shape, bool) for layer, touched in experts.touched.items()}


def _together(step: Step, model: nn.Module, layout: ArrayLayout) -> list[list[int]]:
    """Addresses of each bundle of parameters and of its parts."""
    at = {path: layout.address(array) for path, array in leaves(model.trainable_parameters())}
    pairs = zip(step.joined, step.bundles.all, strict=True)
    return [[layout.address(joined), *(at[path] for path in bundle.paths)] for joined, bundle in pairs]


def _batch(model: nn.Module, step: Step, blank: Batch, shapes: ImageShapes | None) -> tuple[Arrays, list[mx.array]]:
    """The batch's arrays, with images where some are `shapes` at, and what a tower that does not train makes of one."""
    features: list[mx.array] = []
    if shapes is not None:
        rows, length = blank.inputs.shape
        images = blank_vision_batch(rows, length, shapes[:2], vision_spec(model))
        blank = dataclasses.replace(blank, images=images)
        blank.weights.reshape(-1)[: shapes.uncounted] = 0
        if step.tower is not None and shapes.frames:
            features = step.tower.frame_features(images, 0, shapes.patches)
    return arrays(blank, step.tower and (lambda images: _of_all(features, len(images.patches)))), features


def _tower_phase(layout: ArrayLayout, features: list[mx.array], there: set[int]) -> tuple[Phase | None, list[Node]]:
    """The run of a tower by itself, and the nodes that it reads beside parameters."""
    if not features:
        return None, []
    outputs = read(layout, features, there)
    reads = [node for node in all_nodes(outputs) if not node.kind and node.address not in there]
    return _phase("the vision tower", outputs, [node.address for node in reads]), reads


def _of_all(features: list[mx.array], frames: int) -> dict[str, Any]:
    """What a batch of so many frames is given of a tower that made `features` of one."""
    if not features:
        return {}
    whole = [mx.zeros((frames * len(each), each.shape[1]), each.dtype) for each in features]
    mx.eval(whole)
    return {"features": whole[0], "deep": whole[1:]}


def _leaves(tree: Any) -> list[mx.array]:
    return [copy.copy(array) for _, array in leaves(tree) if isinstance(array, mx.array)]


def _replaced(layout: ArrayLayout, old: Sequence[mx.array], new: Sequence[mx.array]) -> list[int]:
    staying = _addresses(layout, new)
    return [at for at in dict.fromkeys(layout.address(array) for array in old) if at not in staying]


def _constants(outputs: Sequence[Node], others: set[int]) -> list[Node]:
    """Values inside the graphs, which the compiled functions keep: scalars above all."""
    return [node for node in all_nodes(outputs) if not node.kind and node.address not in others]


@contextlib.contextmanager
def _as_trained(model: nn.Module, config: TrainConfig) -> Iterator[Any]:
    """The model as Trainer has it while it trains; afterwards as it was. Gives the loss function."""
    modes, key = [(module, module.training) for module in model.modules()], get_key()
    parameters = model.trainable_parameters()
    # Copies: an update of experts writes new values into the model's own arrays.
    model.update(tree_map(copy.copy, parameters))
    with training(model, config, compare=False) as trained:
        model.train()
        try:
            yield trained.loss
        finally:
            model.update(parameters)
            for module, mode in modes:
                module._set_training_mode(mode)
            set_key(key)


def tower_simulated(built: TracedStep, layout: ArrayLayout) -> Simulation | None:
    """The tower that runs before the step, where it does not train, on one frame."""
    if built.tower is None:
        return None
    machine = Simulation(layout, PACES[backend.device()])
    machine.place([*built.held, *built.tower_reads], built.together)
    machine.evaluate(built.tower.order, built.tower.outputs, built.tower.dropped)
    return machine


def simulated(built: TracedStep, layout: ArrayLayout) -> Simulation:
    """The step, run without computing, at the pace of MLX's default device."""
    machine = Simulation(layout, PACES[backend.device()])
    machine.place(built.held, built.together)
    for phase in built.phases:
        machine.place(phase.made)
        machine.evaluate(phase.order, phase.outputs, phase.dropped)
    return machine
