"""Builds a training step as the trainer does, without evaluating anything, and simulates it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import TrainConfig
from ..data import Batch
from ..machine import backend
from ..machine.compiling import without_kernels
from ..models.describe import describe
from ..models.vision.inputs import Looked, blank_vision_batch
from ..models.vision.split import vision_spec
from ..ops.checkpoint import checkpointed
from ..patches import patched
from ..train import announce
from ..train.distributed import World
from ..train.optimizer import build_optimizer
from ..train.step import Arrays, Step, Sums, arrays
from ..train.tree import leaves, random_key, set_random_key
from .array_layout import Layout
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


@dataclass
class Built:
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
    model: nn.Module, config: TrainConfig, rows: int, length: int, layout: Layout, looked: Looked | None = None
) -> Built:
    """The graphs of one iteration of `model` (converted, `prepare`d) on `rows` rows of `length` tokens; `looked`: their
    images, where the model looks at some.

    The model comes out as it went in. Raises what building the step raises: UserError for options that do not fit.
    """
    with _as_trained(model, config) as loss_function:
        optimizer = build_optimizer(config)
        accumulate, clip = config.grad_accumulation_steps, config.grad_clip
        step = Step(model, optimizer, loss_function, World(), accumulate=accumulate, clip=clip)
        before = _leaves(model.trainable_parameters())
        moments = _leaves(optimizer.state)
        everything = _leaves(model.state)
        sums = Sums(step.zeros(), mx.array(0.0), mx.array(0.0))
        accumulated = _leaves(sums)
        names = {layout.address(array): name for name, array in leaves(model.parameters())}
        joined, together = step.joined, _together(step, model, layout)
        given = [*everything, *joined, *moments, *accumulated, random_key()]

        batch, features = _batch(model, step, blank_batch(rows, length, config.pack), looked)
        loss, weight, gradients = step.on_arrays(batch, sums.gradients)
        new = Sums(gradients, sums.loss + loss, sums.weight + weight)
        first = [loss, weight, *_leaves(new)]
        norm = step.update(*new)
        second = [*_leaves(model.trainable_parameters()), *step.joined, *_leaves(optimizer.state), norm, random_key()]

        there = {layout.address(array) for array in given}
        one = read(layout, first, there)
        done = {node.address for node in all_nodes(one)}
        two = read(layout, second, there | {layout.address(array) for array in first})
        width = int(os.environ.get(_WIDTH, "20"))
        # The trainer keeps neither: its arrays live until the graph has read them.
        gone = [*accumulated, *_leaves(batch)]
        phases = [
            Phase("forward and backward", one, evaluation_order(one, width), [layout.address(a) for a in gone]),
            Phase(
                "update",
                two,
                evaluation_order(two, width),
                _replaced(layout, [*before, *joined, *moments, *_leaves(gradients)], second),
            ),
        ]
        tower, tower_reads = _tower_phase(layout, features, there, width)
        data = {layout.address(array) for array in _leaves(batch)}
        constants = [*_constants(one, there | data), *_constants(two, there | done)]
        held = [*read(layout, [*given, *_leaves(batch)], there | data), *constants]
    return Built(
        phases, held, together, names, one[0], len(names) - sum(len(group) - 2 for group in together),
        len(_leaves(gradients)), len(moments),
        sum(array.nbytes for _, array in leaves(model.parameters())),
        sum(array.nbytes for array in _leaves(gradients)), sum(array.nbytes for array in moments),
        rows, length, [*given, *first, *second, *_leaves(batch), *features],
        tower, tower_reads,
    )  # fmt: skip


def _together(step: Step, model: nn.Module, layout: Layout) -> list[list[int]]:
    """Addresses of each bundle of parameters and of its parts."""
    at = {path: layout.address(array) for path, array in leaves(model.trainable_parameters())}
    pairs = zip(step.joined, step.bundles.all, strict=True)
    return [[layout.address(joined), *(at[path] for path in bundle.paths)] for joined, bundle in pairs]


def _batch(model: nn.Module, step: Step, blank: Batch, looked: Looked | None) -> tuple[Arrays, list[mx.array]]:
    """The batch's arrays, with images where some are `looked` at, and what a tower that does not train makes of one."""
    features: list[mx.array] = []
    if looked is not None:
        rows, length = blank.inputs.shape
        images = blank_vision_batch(rows, length, looked[:2], vision_spec(model))
        blank = dataclasses.replace(blank, images=images)
        blank.weights.reshape(-1)[: looked.silent] = 0
        if step.tower is not None and looked.frames:
            features = step.tower.look(images, 0, looked.patches)
    return arrays(blank, step.tower and (lambda images: _of_all(features, len(images.patches)))), features


def _tower_phase(
    layout: Layout, features: list[mx.array], there: set[int], width: int
) -> tuple[Phase | None, list[Node]]:
    """The run of a tower by itself, and the nodes that it reads beside parameters."""
    if not features:
        return None, []
    outputs = read(layout, features, there)
    reads = [node for node in all_nodes(outputs) if not node.kind and node.address not in there]
    return Phase("the vision tower", outputs, evaluation_order(outputs, width), [n.address for n in reads]), reads


def _of_all(features: list[mx.array], frames: int) -> dict[str, Any]:
    """What a batch of so many frames is given of a tower that made `features` of one."""
    if not features:
        return {}
    whole = [mx.zeros((frames * len(each), each.shape[1]), each.dtype) for each in features]
    mx.eval(whole)
    return {"features": whole[0], "deep": whole[1:]}


def _leaves(tree: Any) -> list[mx.array]:
    return [array for _, array in leaves(tree) if isinstance(array, mx.array)]


def _replaced(layout: Layout, old: Sequence[mx.array], new: Sequence[mx.array]) -> list[int]:
    kept = {layout.address(array) for array in new}
    return [at for at in dict.fromkeys(layout.address(array) for array in old) if at not in kept]


def _constants(outputs: Sequence[Node], others: set[int]) -> list[Node]:
    """Values inside the graphs, which the compiled functions keep: scalars above all."""
    return [node for node in all_nodes(outputs) if not node.kind and node.address not in others]


@contextlib.contextmanager
def _as_trained(model: nn.Module, config: TrainConfig) -> Iterator[Any]:
    """The model as Trainer has it while it trains; afterwards as it was. Gives the loss function."""
    modes, key = [(module, module.training) for module in model.modules()], random_key()
    parameters = model.trainable_parameters()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(model))
        if config.grad_checkpoint:
            stack.enter_context(checkpointed([layer.module for layer in describe(model)]))
        stack.enter_context(without_kernels())
        loss, _ = announce.choose_loss(model, compare=False)
        model.train()
        try:
            yield loss
        finally:
            model.update(parameters)
            for module, mode in modes:
                module._set_training_mode(mode)
            set_random_key(key)


def tower_simulated(built: Built, layout: Layout) -> Simulation | None:
    """The tower that runs before the step, where it does not train, on one frame."""
    if built.tower is None:
        return None
    machine = Simulation(layout, PACES[backend.device()])
    machine.place([*built.held, *built.tower_reads], built.together)
    machine.evaluate(built.tower.order, built.tower.outputs, built.tower.dropped)
    return machine


def simulated(built: Built, layout: Layout) -> Simulation:
    """The step, run without computing, at the pace of MLX's default device."""
    machine = Simulation(layout, PACES[backend.device()])
    machine.place(built.held, built.together)
    for phase in built.phases:
        machine.evaluate(phase.order, phase.outputs, phase.dropped)
    return machine
