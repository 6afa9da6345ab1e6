"""Forecasts the peaks of one training step: how much memory is alive, where in the step, and in which arrays."""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import mlx.nn as nn

from ..layers import describe
from ..ops.recomputation import Checkpoints
from ..options.config import TrainConfig
from .arithmetic import Products, products
from .array_layout import ArrayLayout
from .device_limits import Brake
from .few_layers import Amount, FewLayers, of_all_layers, only, places_of, serves
from .graph import Node
from .primitives import without_rule
from .simulate import Peak, Simulation
from .traced_layers import InputsPlace
from .traced_step import BatchShape, TracedStep, before_step, simulate_step, simulate_tower, trace_step

_SHOWN = 5
_SEARCHED = 400


@dataclass(frozen=True)
class AliveKind:
    """The buffers alive at a peak that one kind of primitive made."""

    kind: str
    buffers: int
    bytes: int


@dataclass(frozen=True)
class Moment:
    """A peak of bytes or buffers: its `amount`, `where` in the step it is, and the live arrays, largest first."""

    amount: int
    where: str
    alive: list[AliveKind]


@dataclass(frozen=True)
class Forecast:
    """The forecast of one step of `rows` rows of `length` tokens.

    Args:
        rows: Rows of the batch.
        length: Tokens of a row, padding included.
        rank: The rank of the LoRA adapters.
        buffers: The peak of live buffers.
        bytes: The peak of live bytes.
        counts: How many arrays are parameters, gradients and moments; the peak of buffers includes them.
        sizes: Bytes of parameters, gradients and moments; the peak of bytes includes them.
        unknown: How many primitives of the step have no rule in primitives.py, by kind.
        products: The matrix products of the step.
        layer_inputs: Bytes of layers' inputs that a step by layers keeps between its passes.
        memory_limit: The bytes from which on MLX waits for queued work in this step; None where it does not.
        seconds: How long it took to make this plan.
    """

    rows: int
    length: int
    rank: int
    buffers: Moment
    bytes: Moment
    counts: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    products: Products = field(default_factory=Products)
    layer_inputs: int = 0
    memory_limit: int | None = None
    seconds: float = field(default=0.0, compare=False)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, padding included."""
        return self.rows * self.length

    @property
    def beyond(self) -> int:
        """Live buffers at the peak other than parameters, gradients and moments."""
        return self.buffers.amount - sum(self.counts.values())


def forecast_step(
    model: nn.Module,
    config: TrainConfig,
    shape: BatchShape,
    layout: ArrayLayout,
    checkpoints: Checkpoints | None = None,
    *,
    layer_inputs: InputsPlace | None = None,
    brake: Brake | None = None,
    few: FewLayers | None = None,
) -> Forecast:
    """Forecast a training step; nothing is evaluated and the model is left unchanged.

    Args:
        model: The model, with its adapters.
        config: The run.
        shape: The shape of the batch.
        layout: How the loaded MLX stores its arrays.
        checkpoints: The layers to recompute in the place of those that `config.grad_checkpoint` names.
        layer_inputs: The place where a step by layers keeps the inputs of layers; None for a step as a whole.
        brake: From how many bytes on MLX waits for queued work; None where it does not.
        few: The layers that stand for all of them; None to trace all.
    """
    collects, started = gc.isenabled(), time.monotonic()
    gc.disable()
    try:
        forecast = None
        if few is not None and not few.all:
            forecast = _planned_by_few(model, config, shape, layout, checkpoints or Checkpoints(), brake, few)
        if forecast is None:
            built = trace_step(model, config, shape, layout, checkpoints, layer_inputs=layer_inputs)
            forecast = _planned(built, config, layout, brake)
            del built
    finally:
        # A graph has reference cycles, and its constants occupy buffers until the cycles are collected. Objects made
        # while the collector waited are young, so that all others need not be looked through.
        gc.collect(0)
        if collects:
            gc.enable()
    return replace(forecast, seconds=time.monotonic() - started)


def _planned_by_few(
    model: nn.Module,
    config: TrainConfig,
    shape: BatchShape,
    layout: ArrayLayout,
    checkpoints: Checkpoints,
    brake: Brake | None,
    few: FewLayers,
) -> Forecast | None:
    """The forecast by a trace of a few layers; None where they cannot be told from each other in it."""
    paths, kept = [layer.path for layer in describe(model)], few.checkpoints(checkpoints)
    of_all, arrays = before_step(model, config, layout, checkpoints)
    with only(model, few):
        of_few, _ = before_step(model, config, layout, kept)
        built = trace_step(model, config, shape, layout, kept)
        machines = simulate_step(built, layout), simulate_step(built, layout, 0)
        places = places_of(built, machines[0].evaluated, model)
    if not serves(few, places):
        return None
    given = Amount(of_all.live_bytes - of_few.live_bytes, of_all.live - of_few.live)
    queued, waiting = (of_all_layers(few, places, machine, machines[1], given) for machine in machines)
    largest, most = (max(queued, key=lambda place: queued[place][amount]) for amount in range(2))
    amount, limit = queued[largest].bytes, None
    if brake is not None:
        least = max(amount.bytes for amount in waiting.values())
        limit = brake.limit(int(least))
        amount = min(amount, max(least, limit))
    return Forecast(
        shape.rows,
        shape.length,
        config.lora_parameters.rank,
        Moment(int(queued[most].buffers), most.words(paths), []),
        Moment(int(amount), largest.words(paths), []),
        {name: count for name, (count, _) in arrays.items()},
        {name: size for name, (_, size) in arrays.items()},
        without_rule(machines[0].evaluated),
        memory_limit=limit,
    )


def _planned(built: TracedStep, config: TrainConfig, layout: ArrayLayout, brake: Brake | None) -> Forecast:
    limit = None
    if brake is not None:
        limit = brake.limit(simulate_step(built, layout, 0).bytes.amount)
    machine, tower = simulate_step(built, layout, limit), simulate_tower(built, layout)
    peak_bytes = _moment(machine, built, machine.bytes, by_bytes=True)
    if tower is not None and tower.bytes.amount > peak_bytes.amount:
        peak_bytes = _moment(tower, built, tower.bytes, by_bytes=True, where="the vision tower, before the step")
    counts = {"parameters": built.parameters, "gradients": built.gradients, "moments": built.moments}
    sizes = {
        "parameters": built.parameter_bytes, "gradients": built.gradient_bytes, "moments": built.moment_bytes,
    }  # fmt: skip
    return Forecast(
        built.rows,
        built.length,
        config.lora_parameters.rank,
        _moment(machine, built, machine.buffers, by_bytes=False),
        peak_bytes,
        counts,
        sizes,
        without_rule(machine.evaluated),
        products(machine.evaluated),
        built.layer_inputs,
        limit,
    )


def _moment(machine: Simulation, built: TracedStep, peak: Peak, *, by_bytes: bool, where: str = "") -> Moment:
    alive = machine.alive(peak.at)
    buffers, sizes = Counter(b.kind for b in alive), Counter[str]()
    for buffer in alive:
        sizes[buffer.kind] += buffer.size
    alive_kinds = [AliveKind(kind, buffers[kind], sizes[kind]) for kind in buffers if kind != "given"]
    alive_kinds.sort(key=lambda kind: kind.bytes if by_bytes else kind.buffers, reverse=True)
    return Moment(peak.amount, where or _location(machine.evaluated, built, peak.at), alive_kinds[:_SHOWN])


def _location(evaluated: list[Node], built: TracedStep, at: int) -> str:
    """The phase of primitive `at` and the parameter read nearest to it: `the backward pass, near lm_head.weight`."""
    if at >= built.update_from:
        return "the update"
    here = evaluated[min(at, len(evaluated) - 1)]
    phase = "the forward pass" if here in built.forward else "the backward pass"
    for distance in range(_SEARCHED):
        for index in (at - distance, at + distance):
            if 0 <= index < built.update_from:
                for source in evaluated[index].inputs:
                    if source.address in built.names:
                        return f"{phase}, near {built.names[source.address]}"
    return phase
