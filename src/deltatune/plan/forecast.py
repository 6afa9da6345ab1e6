"""Forecasts the peaks of one training step: how much memory is alive, and where in the step."""

from __future__ import annotations

import gc
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import mlx.nn as nn

from ..layers import describe
from ..models.vision.split import frozen_tower
from ..ops.recomputation import Checkpoints
from ..options.config import TrainConfig
from ..train.by_layer.layer_functions import lowest_layer
from .arithmetic import Products, products
from .array_layout import ArrayLayout
from .device_limits import Brake
from .few_layers import FewLayers, StepPlace, few_layers, of_all_layers, only, peaks, places_of, serves
from .primitives import without_rule
from .simulate import Amount, Simulation
from .traced_layers import InputsPlace
from .traced_step import BatchShape, Before, before_step, simulate_step, simulate_tower, trace_step


@dataclass(frozen=True)
class Moment:
    """A peak of bytes or buffers: its `amount`, and `where` in the step it is."""

    amount: int
    where: str


@dataclass(frozen=True)
class Forecast:
    """The forecast of one step of `rows` rows of `length` tokens, padding included, with adapters of a rank.

    Args:
        buffers: The peak of live buffers.
        bytes: The peak of live bytes.
        counts: How many arrays are parameters, gradients and moments; the peak of buffers includes them.
        sizes: Bytes of parameters, gradients and moments; the peak of bytes includes them.
        unknown: How many primitives of the step have no rule in primitives.py, by kind.
        products: The matrix products of a step by layers.
        layer_inputs: Bytes of layers' inputs that a step by layers keeps between its passes.
        memory_limit: The bytes from which on MLX waits for queued work in this step; None where it does not.
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

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, padding included."""
        return self.rows * self.length

    @property
    def beyond(self) -> int:
        """Live buffers at the peak other than parameters, gradients and moments."""
        return self.buffers.amount - sum(self.counts.values())


# The tokens of a step that are enough to count the products of each token.
_COUNTED = 128
# A task of MLX's queue has ten operations, and how many are in the one that a loop begins with is left to chance.
_QUEUED = (0, 5)


def forecast_step(
    model: nn.Module,
    config: TrainConfig,
    shape: BatchShape,
    layout: ArrayLayout,
    checkpoints: Checkpoints | FewLayers | None = None,
    *,
    layer_inputs: InputsPlace | None = None,
    brake: Brake | None = None,
) -> Forecast:
    """Forecast one training step, as Steps does."""
    return Steps(model, config, layout).forecast(shape, checkpoints, layer_inputs=layer_inputs, brake=brake)


class Steps:
    """Forecasts training steps of a model with its adapters; nothing is evaluated and the model is left unchanged."""

    def __init__(self, model: nn.Module, config: TrainConfig, layout: ArrayLayout):
        self.model = model
        self.config = config
        self._layout = layout
        # The arrays before a step of all layers.
        self._before: Before | None = None
        # The forecasts so far.
        self._made: dict[Hashable, Forecast] = {}
        # The layers that are traced, by what is recomputed.
        self._few: dict[tuple[tuple[int, ...], bool], FewLayers] = {}

    def forecast(
        self,
        shape: BatchShape,
        checkpoints: Checkpoints | FewLayers | None = None,
        *,
        layer_inputs: InputsPlace | None = None,
        brake: Brake | None = None,
    ) -> Forecast:
        """Forecast one step.

        Args:
            shape: The shape of the batch.
            checkpoints: The layers to recompute in the place of those that `config.grad_checkpoint` names; or the
                layers that are traced for all.
            layer_inputs: The place where a step by layers keeps the inputs of layers; None for a step as a whole.
            brake: From how many bytes on MLX waits for queued work; None where it does not.
        """
        if checkpoints is None:
            checkpoints = Checkpoints(range(len(describe(self.model))) if self.config.grad_checkpoint else ())
        few = checkpoints if isinstance(checkpoints, FewLayers) else self._few_layers(checkpoints)
        # The backward pass of a tower that trains comes after that of all layers.
        if shape.images and frozen_tower(self.model) is None:
            few = few.every
        key = shape, str(few), layer_inputs, brake
        if key in self._made:
            return self._made[key]
        collects = gc.isenabled()
        gc.disable()
        try:
            self._made[key] = self._planned(shape, few, layer_inputs, brake)
            return self._made[key]
        finally:
            # A graph has reference cycles, and its constants occupy buffers until the cycles are collected. Objects
            # made while the collector waited are young, so that all others need not be looked through.
            gc.collect(0)
            if collects:
                gc.enable()

    def _few_layers(self, checkpoints: Checkpoints) -> FewLayers:
        key = tuple(checkpoints.layers), checkpoints.operators
        if key not in self._few:
            self._few[key] = few_layers(self.model, Checkpoints(*key))
        return self._few[key]

    def _planned(
        self, shape: BatchShape, few: FewLayers, layer_inputs: InputsPlace | None, brake: Brake | None
    ) -> Forecast:
        """The forecast by a trace of a few layers, or of all where they cannot be told from each other in it."""
        model, config, layout = self.model, self.config, self._layout
        paths = [layer.path for layer in describe(model)]
        with only(model, few):
            built = trace_step(
                model, config, shape, layout, few.checkpoints, layer_inputs=layer_inputs, shortened=few.shortened
            )
            machines = [simulate_step(built, layout, queued=queued) for queued in _QUEUED]
            tower = simulate_tower(built, layout)
            places = places_of(built, machines[0].evaluated, model)
        reached = len(paths) - lowest_layer(model, paths)
        if self._before is None:
            self._before = built.before if few.all else before_step(model, config, layout, few.recomputed)
        of_all = self._before
        left_out = of_all.held.plus(built.before.held, -1)

        def whole(machine: Simulation) -> dict[StepPlace, Amount]:
            return peaks(places, machine) if few.all else of_all_layers(few, places, machine, left_out)

        if not few.all and not serves(few, places):
            return self._planned(shape, few.every, layer_inputs, brake)
        queued = [(held, place) for machine in machines for place, held in whole(machine).items()]
        (most, largest), (buffers, place) = (max(queued, key=lambda peak: peak[0][unit]) for unit in range(2))
        amount = most.bytes
        limit = None
        where = largest.words(paths)
        if brake is not None:
            # Each operation waits for the one before.
            least = max(held.bytes for held in whole(simulate_step(built, layout, 0)).values())
            limit = brake.limit(int(least))
            amount = min(amount, max(least, limit))
        if tower is not None and (alone := tower.bytes + left_out.bytes) > amount:
            amount = alone
            where = "the vision tower, before the step"
        return Forecast(
            shape.rows,
            shape.length,
            config.lora_parameters.rank,
            Moment(int(buffers.buffers), place.words(paths)),
            Moment(int(amount), where),
            of_all.counts,
            of_all.sizes,
            without_rule(machines[0].evaluated),
            self._products(shape, few, layer_inputs) if layer_inputs else Products(),
            built.layer_inputs * reached // max(1, few.chosen_from(len(paths) - reached)),
            limit,
        )

    def _products(self, shape: BatchShape, few: FewLayers, inputs: InputsPlace) -> Products:
        """The matrix products of a step by layers, by those of a short one, which has every turn of its loops."""
        short = shape if shape.images else replace(shape, rows=1, length=min(shape.length, _COUNTED))
        with only(self.model, few):
            built = trace_step(self.model, self.config, short, self._layout, few.checkpoints, layer_inputs=inputs)
            order = [node for phase in built.phases for node in phase.order]
            places = places_of(built, order, self.model)
        times = {place: few.times(place) for place in set(places)}
        counted = products(order, (times[place] for place in places[1:]))
        return counted.times(shape.rows * shape.length / (short.rows * short.length))
