"""The plan of one training step: how much will be alive at most, where, and because of what."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field

import mlx.nn as nn

from ..config import TrainConfig
from ..models.vision.inputs import ImageShapes
from .array_layout import ArrayLayout
from .graph import Node
from .simulate import Peak, Simulation
from .traced_step import TracedStep, build, simulated, tower_simulated

_SHOWN = 5
_SEARCHED = 400


@dataclass(frozen=True)
class AliveKind:
    """Buffers alive at a peak that one kind of primitive made."""

    kind: str
    buffers: int
    bytes: int


@dataclass(frozen=True)
class Moment:
    """The most of something: `amount`, `where` in the step, and what was alive then, the most first."""

    amount: int
    where: str
    alive: list[AliveKind]


@dataclass(frozen=True)
class Forecast:
    """One step of `rows` rows of `length` tokens. Counts and bytes of parameters, gradients, moments: within the peaks.

    beyond: live buffers at the peak that are none of those three.
    """

    rows: int
    length: int
    rank: int
    buffers: Moment
    bytes: Moment
    counts: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    primitives: int = 0

    @property
    def tokens(self) -> int:
        """Tokens a micro-batch, padding included."""
        return self.rows * self.length

    @property
    def beyond(self) -> int:
        """Live buffers at the peak beside parameters, gradients and moments."""
        return self.buffers.amount - sum(self.counts.values())


def forecast_step(
    model: nn.Module,
    config: TrainConfig,
    rows: int,
    length: int,
    layout: ArrayLayout,
    images: ImageShapes | None = None,
) -> Forecast:
    """Forecast a step of the converted `model`; nothing is evaluated and the model comes out as it went in.

    images: the shapes of a batch's images, of a model that looks at some.
    """
    try:
        return _planned(build(model, config, rows, length, layout, images), config, layout)
    finally:
        # A graph is full of cycles, and its constants are buffers.
        gc.collect()


def _planned(built: TracedStep, config: TrainConfig, layout: ArrayLayout) -> Forecast:
    machine, tower = simulated(built, layout), tower_simulated(built, layout)
    most = _moment(machine, built, machine.bytes, by_bytes=True)
    if tower is not None and tower.bytes.amount > most.amount:
        most = _moment(tower, built, tower.bytes, by_bytes=True, where="the vision tower, before the step")
    counts = {"parameters": built.parameters, "gradients": built.gradients, "moments": built.moments}
    sizes = {
        "parameters": built.parameter_bytes, "gradients": built.gradient_bytes, "moments": built.moment_bytes,
    }  # fmt: skip
    return Forecast(
        built.rows,
        built.length,
        config.lora_parameters.rank,
        _moment(machine, built, machine.buffers, by_bytes=False),
        most,
        counts,
        sizes,
        len(machine.evaluated),
    )


def _moment(machine: Simulation, built: TracedStep, peak: Peak, *, by_bytes: bool, where: str = "") -> Moment:
    alive = machine.alive(peak.at)
    buffers, sizes = Counter(b.kind for b in alive), Counter[str]()
    for buffer in alive:
        sizes[buffer.kind] += buffer.size
    found = [AliveKind(kind, buffers[kind], sizes[kind]) for kind in buffers if kind != "given"]
    found.sort(key=lambda each: each.bytes if by_bytes else each.buffers, reverse=True)
    return Moment(peak.amount, where or _place(machine.evaluated, built, peak.at), found[:_SHOWN])


def _place(evaluated: list[Node], built: TracedStep, at: int) -> str:
    """`backward pass, model.layers.3.mlp`: the phase, and the module whose parameter is read nearest to it."""
    if at >= len(built.phases[0].order):
        return "the update"
    behind = _ancestors(built.loss)
    here = evaluated[min(at, len(evaluated) - 1)]
    phase = "the forward pass" if here in behind else "the backward pass"
    last = len(built.phases[0].order)
    for distance in range(_SEARCHED):
        for index in (at - distance, at + distance):
            if 0 <= index < last:
                for given in evaluated[index].inputs:
                    if given.address in built.names:
                        return f"{phase}, near {built.names[given.address]}"
    return phase


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one not in found:
            found.add(one)
            stack += one.inputs
            stack += one.siblings
    return found
