"""Forecasts the peaks of one training step: how much memory is alive, and where in the step."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..models.vision.split import frozen_tower
from ..ops.recomputation import Checkpoints
from ..options.config import TrainConfig
from ..train.by_layer.layer_functions import lowest_layer
from .array_layout import ArrayLayout
from .device_limits import Brake
from .few_layers import FewLayers, Measured, ModelLayers, only, places_of, serves
from .graph import Node
from .primitives import without_rule
from .traced_layers import InputsPlace
from .traced_step import BatchShape, Before, before_step, simulate_step, simulate_tower, trace_step

# By kind of primitive: the position of the input that is summed over its last axis.
_PRODUCTS = {"Matmul": 0, "AddMM": 0, "GatherMM": 0, "QuantizedMatmul": 0, "GatherQMM": 0}
# Enough rows, summed elements and columns to be as fast as it gets. More take longer to measure, and a vocabulary's
# matrix would take gigabytes.
_MOST = (1024, 8192, 8192)


@dataclass(frozen=True)
class Products:
    """The matrix products of a step: multiplications and additions, without those of kernels of our own.

    `largest` are rows, summed length and columns of the product that most of the operations are in.
    """

    operations: int = 0
    largest: tuple[int, int, int] | None = None

    def times(self, tokens: float) -> Products:
        """Those of a step with so many times the tokens."""
        largest = None if self.largest is None else (int(self.largest[0] * tokens), *self.largest[1:])
        return Products(int(self.operations * tokens), largest)


def products(order: Iterable[Node], times: Iterable[int] = repeat(1)) -> Products:
    """Return the matrix products among the primitives of a graph, each of which counts so many times."""
    operations: Counter[tuple[int, int, int]] = Counter()
    for node, count in zip(order, times, strict=False):
        if node.kind in _PRODUCTS and node.size:
            inner = node.inputs[_PRODUCTS[node.kind]].shape[-1]
            columns = node.shape[-1]
            operations[node.size // columns, inner, columns] += 2 * node.size * inner * count
    largest = max(operations, key=lambda shape: operations[shape], default=None)
    return Products(operations.total(), largest)


def speed(shape: tuple[int, int, int], dtype: mx.Dtype, seconds: float = 0.3) -> float:
    """Return how many operations a second a product of these rows, summed length and columns does at its best.

    It is measured for so many seconds, and on a part of a size that is larger than need be.
    """
    rows, inner, columns = map(min, shape, _MOST)
    x, w = (mx.random.normal(size, dtype=dtype, key=mx.random.key(0)) for size in ((rows, inner), (columns, inner)))
    mx.eval(x, w, x @ w.T)
    best = float("inf")
    begun = time.perf_counter()
    while best == float("inf") or time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        mx.eval(x @ w.T)
        best = min(best, time.perf_counter() - started)
    return 2 * rows * inner * columns / best


@dataclass(frozen=True)
class Moment:
    """A peak of bytes or buffers: its `amount`, and `where` in the step it is."""

    amount: int
    where: str


@dataclass(frozen=True)
class Forecast:
    """The forecast of one step of `rows` rows of `length` tokens, padding included, with adapters of a rank.

    Its peaks of live buffers and bytes include parameters, gradients and moments, which `counts` and `sizes` have by
    themselves. `unknown` primitives have no rule in primitives.py. `products` and `layer_inputs` are the matrix
    products of a step by layers, and the bytes of inputs that it keeps between its passes. MLX waits for queued work
    from `memory_limit` bytes on; None where it does not. Layers save so many bytes for their backward passes, 0 where
    that was not measured.
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
    saved: int = 0

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


class _Short(NamedTuple):
    """A step of few layers that was traced and simulated.

    `measured` has a run for each number of operations that are queued before it; `waiting` is one in which each
    operation waits for the one before, None where MLX never waits. `tower` are the bytes of a vision tower before it.
    """

    before: Before
    measured: list[Measured]
    waiting: Measured | None
    unknown: dict[str, int]
    products: Products
    layer_inputs: int
    tower: float


class Steps:
    """Forecasts training steps of a model with its adapters; nothing is evaluated and the model is left unchanged."""

    def __init__(self, model: nn.Module, config: TrainConfig, layout: ArrayLayout):
        self.model = model
        self.config = config
        self._layout = layout
        self._layers = ModelLayers(model)
        # The arrays before a step of all layers.
        self._before: Before | None = None
        # The steps that were traced, None for those of which the layers cannot be told from each other.
        self._traced: dict[Hashable, _Short | None] = {}

    def forecast(
        self,
        shape: BatchShape,
        checkpoints: Checkpoints | FewLayers | None = None,
        *,
        layer_inputs: InputsPlace | None = None,
        brake: Brake | None = None,
    ) -> Forecast:
        """Forecast one step, as a whole or by layers, which keeps its `layer_inputs` in one place or the other.

        `checkpoints` are recomputed in the place of the layers that `config.grad_checkpoint` names; or they are the
        layers that are traced for all.
        """
        paths = self._layers.paths
        if checkpoints is None:
            checkpoints = Checkpoints(range(len(paths)) if self.config.grad_checkpoint else ())
        few = checkpoints if isinstance(checkpoints, FewLayers) else self._layers.few(checkpoints)
        # The backward pass of a tower that trains comes after that of all layers.
        if shape.images and frozen_tower(self.model) is None:
            few = few.every
        short = self._short(shape, few, layer_inputs, brake is not None)
        if short is None:
            few = few.every
            short = self._short(shape, few, layer_inputs, brake is not None)
            assert short is not None
        if self._before is None:
            self._before = short.before if few.all else before_step(self.model, self.config, self._layout)
        of_all = self._before
        left_out = of_all.held.plus(short.before.held, -1)
        queued = [(held, place) for one in short.measured for place, held in one.with_all(few, left_out).items()]
        (most, largest), (buffers, place) = (max(queued, key=lambda peak: peak[0][unit]) for unit in range(2))
        amount = most.bytes
        limit = None
        where = largest.words(paths)
        if brake is not None and short.waiting is not None:
            least = max(held.bytes for held in short.waiting.with_all(few, left_out).values())
            limit = brake.limit(int(least))
            amount = min(amount, max(least, limit))
        if short.tower and (alone := short.tower + left_out.bytes) > amount:
            amount = alone
            where = "the vision tower, before the step"
        reached = len(paths) - lowest_layer(self.model, paths)
        return Forecast(
            shape.rows,
            shape.length,
            self.config.lora_parameters.rank,
            Moment(int(buffers.buffers), place.words(paths)),
            Moment(int(amount), where),
            of_all.counts,
            of_all.sizes,
            short.unknown,
            short.products,
            short.layer_inputs * reached // max(1, few.chosen_from(len(paths) - reached)),
            limit,
            int(sum(short.measured[0].saved[kind].bytes for kind in few.kinds)) if short.measured[0].saved else 0,
        )

    def _short(self, shape: BatchShape, few: FewLayers, inputs: InputsPlace | None, waits: bool) -> _Short | None:
        """Trace and simulate a step of few layers, once for all choices of them that have the same trace."""
        key = shape, few.traced, inputs, waits
        if key not in self._traced:
            collects = gc.isenabled()
            gc.disable()
            try:
                self._traced[key] = self._simulated(shape, few, inputs, waits)
            finally:
                # A graph has cycles, and its constants occupy buffers until these young objects are collected.
                gc.collect(0)
                if collects:
                    gc.enable()
        return self._traced[key]

    def _simulated(self, shape: BatchShape, few: FewLayers, inputs: InputsPlace | None, waits: bool) -> _Short | None:
        model, layout = self.model, self._layout
        with only(model, few):
            built = trace_step(model, self.config, shape, layout, few.checkpoints, layer_inputs=inputs, inner=few.inner)
            machines = [simulate_step(built, queued=queued) for queued in _QUEUED]
            tower = simulate_tower(built)
        places = places_of(built, machines[0].evaluated, self._layers.paths[: len(few.chosen)])
        if not few.all and not serves(few, places):
            return None
        waiting = Measured.of(few, places, simulate_step(built, 0)) if waits else None
        # A graph without cycles is freed at once, and the collector has little to look through.
        for node in machines[0].evaluated:
            for sibling in node.siblings:
                sibling.siblings = []
            node.siblings = []
        return _Short(
            built.before,
            [Measured.of(few, places, machine) for machine in machines],
            waiting,
            without_rule(machines[0].evaluated),
            self._products(shape, few, inputs) if inputs else Products(),
            built.layer_inputs,
            0 if tower is None else tower.bytes,
        )

    def _products(self, shape: BatchShape, few: FewLayers, inputs: InputsPlace) -> Products:
        """The matrix products of a step by layers, by those of a short one, which has every turn of its loops."""
        short = shape if shape.images else replace(shape, rows=1, length=min(shape.length, _COUNTED))
        with only(self.model, few):
            built = trace_step(self.model, self.config, short, self._layout, few.checkpoints, layer_inputs=inputs)
            order = [node for phase in built.phases for node in phase.order]
            places = places_of(built, order, self._layers.paths[: len(few.chosen)])
        times = {place: few.times(place) for place in set(places)}
        counted = products(order, (times[place] for place in places[1:]))
        return counted.times(shape.rows * shape.length / (short.rows * short.length))
