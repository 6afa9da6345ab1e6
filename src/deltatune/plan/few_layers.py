"""Computes the memory of a step of all layers from that of a few of them, among which is one of every kind.

At any moment the layers that have run hold the tensors saved for the backward pass, and those that the backward pass
has left hold their gradients. So the memory of the whole is that of the few, and these for each layer left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import UserError
from ..layers import describe, logits_of
from ..models.layer_caches import carries
from ..models.vision.split import has_vision
from ..ops.functional import undisturbed
from ..ops.pieces import Carry
from ..ops.recomputation import Checkpoints
from ..train.by_layer.layer_calls import ArrayArgument, LayerCall, LayerCalls, Recorder
from ..train.by_layer.layer_functions import signature
from ..train.tree import leaves, nbytes
from .graph import Node
from .simulate import Amount, Simulation
from .traced_step import TracedStep

# Fewer layers than these have none between the first and the last.
_FEWEST = 5
# Tokens of a row that is longer than any window of attention.
_LONG = 1 << 20
_FORWARD = "forward"
_LOSS = "loss"
_BACKWARD = "backward"
_UPDATE = "update"
UPDATE = "the update"


class StepPlace(NamedTuple):
    """A part of a step: its phase, the position of a layer, and the parameter that was read last."""

    phase: str
    layer: int
    parameter: str

    def words(self, paths: Sequence[str]) -> str:
        """The place in words, with the layer of those at `paths`."""
        if self.phase == _UPDATE:
            return UPDATE
        near = f", near {paths[self.layer]}.{self.parameter}" if self.parameter else ""
        return f"the {_BACKWARD if self.phase == _BACKWARD else _FORWARD} pass{near}"


class FewLayers(NamedTuple):
    """A choice of a model's layers that stand for all of them.

    `kinds` has one of each layer of the model, and `chosen` the positions of those that are kept. `gradients` are those
    of one layer, by kind. `shortened` loops over a long row are traced without most of their turns.
    """

    kinds: list[int]
    chosen: list[int]
    gradients: dict[int, Amount]
    recomputed: Checkpoints
    shortened: bool = True

    @property
    def traced(self) -> Hashable:
        """A key that choices share if steps of the kept layers have the same trace."""
        return tuple(self.kept), self.all, self.recomputed.operators, self.shortened

    @property
    def kept(self) -> list[int]:
        """The kinds of the layers that are kept."""
        return [self.kinds[at] for at in self.chosen]

    @property
    def all(self) -> bool:
        """Whether all layers are kept."""
        return len(self.chosen) == len(self.kinds)

    @property
    def every(self) -> FewLayers:
        """The choice of all layers."""
        return self._replace(chosen=list(range(len(self.kinds))))

    @property
    def inner(self) -> list[int] | None:
        """The positions among the kept layers whose peaks layers of their kinds behind them tell; None without loops.

        The last two layers are not among them, near which a step needs the most.
        """
        if not self.shortened:
            return None
        layers = self.kept
        return [at for at in range(len(layers) - 2) if layers[at] in layers[at + 1 :]]

    def chosen_from(self, lowest: int) -> int:
        """How many of the kept layers are the layer `lowest` or above it."""
        return sum(at >= lowest for at in self.chosen)

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the kept layers."""
        layers = [at for at, whole in enumerate(self.chosen) if whole in self.recomputed.layers]
        return Checkpoints(layers, self.recomputed.operators)

    def times(self, place: StepPlace) -> int:
        """For how many layers a kept one stands at a place in a step of few."""
        if place.phase not in (_FORWARD, _BACKWARD) or place.layer < 0:
            return 1
        return [self.like(at) for at in range(len(self.kinds))].count(place.layer)

    def like(self, at: int) -> int:
        """The position among the kept layers of one that stands for the layer `at`: the first, a middle or the last."""
        kind = self.kinds[at]
        same = [position for position, other in enumerate(self.kept) if other == kind]
        before = self.kinds[:at].count(kind)
        behind = self.kinds[at + 1 :].count(kind)
        return same[-1 - behind] if behind < (len(same) + 1) // 2 else same[min(before, len(same) // 2)]


class ModelLayers:
    """The layers of a model by kind: those of a kind compute the same function of arrays of the same shapes."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._layers = describe(model)
        self.paths = [layer.path for layer in self._layers]
        signatures = [signature(layer.module) for layer in self._layers]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(signatures))}
        self._numbers = [numbers[kind] for kind in signatures]
        # How the model calls layers that it has alone, by their positions.
        self._called: dict[tuple[int, ...], list[Any]] = {}

    def few(self, checkpoints: Checkpoints) -> FewLayers:
        """Choose layers of every kind, at the end two like the last two; the model must call them as among all.

        Layers that are recomputed are of other kinds than those that are not.
        """
        kinds = [2 * number + (at in checkpoints.layers) for at, number in enumerate(self._numbers)]
        trees = (layer.module.trainable_parameters() for layer in self._layers)
        gradients = {kind: Amount(nbytes(tree), len([*leaves(tree)])) for kind, tree in zip(kinds, trees, strict=True)}
        every = FewLayers(kinds, [*range(len(kinds))], gradients, checkpoints)
        if len(kinds) <= _FEWEST or _held(self._model) is None:
            return every
        # Pictures enter layers by their positions, too.
        among_all = [] if has_vision(self._model) else self._calls(every)
        calls: Sequence[Any] = among_all or [None] * len(kinds)
        mixers = [(layer.kind, layer.experts, call) for layer, call in zip(self._layers, calls, strict=True)]
        # A model may look at its first layer with a mixer for the masks of all.
        places = 1 + max(map(mixers.index, mixers)), len(kinds)
        free, ordered = (every._replace(chosen=_chosen(mixers, kinds, before)) for before in places)
        for few in (free, ordered) if among_all else ():
            if _numbered([among_all[at] for at in few.chosen]) == _numbered(self._calls(few)):
                return few
        return every if among_all else ordered

    def _calls(self, few: FewLayers) -> list[Any]:
        key = tuple(few.chosen)
        if key not in self._called:
            with only(self._model, few):
                self._called[key] = _calls(self._model)
        return self._called[key]


def _calls(model: nn.Module) -> list[tuple[LayerCall, Carry | None]]:
    """How a model calls its layers on a row longer than their windows, and their carries; nothing is computed.

    Nothing is returned of a model that looks for layers or caches at positions where it has none.
    """
    layers = describe(model)
    recorder = Recorder()
    try:
        carried = carries(model, layers)
        with undisturbed(model), LayerCalls([layer.module for layer in layers], recorder).watched():
            logits_of(model, mx.zeros((1, _LONG), mx.int32))
    except UserError:  # Its layers hand on more than hidden states.
        recorder.calls = [LayerCall()] * len(layers)
    except (AttributeError, LookupError, TypeError, ValueError):
        return []
    return list(zip(recorder.calls, carried, strict=True))


def _numbered(calls: Sequence[tuple[LayerCall, Carry | None]]) -> list[tuple[Any, ...]]:
    """Calls with their arrays numbered in the order in which the layers read them; no row is packed."""
    numbers: dict[int, int] = {}

    def numbered(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(numbered, value))
        if not isinstance(value, ArrayArgument):
            return value
        return value._replace(at=numbers.setdefault(value.at, len(numbers)))

    return [(numbered(call.positional), numbered(call.keywords), carry) for call, carry in calls]


def _chosen(mixers: Sequence[Hashable], kinds: Sequence[int], in_order: int) -> list[int]:
    """Return the positions of the first layer, of one of every kind behind it, and of two of the last two's kinds.

    Layers at the end are unlike the others of their kinds. So many have mixers in the order of the model's first ones.
    """
    chosen = [0]
    lacking = set(kinds[1:-1])
    last = list(kinds[-2:])
    while last:
        behind = range(chosen[-1] + 1, len(kinds))
        able = [at for at in behind if len(chosen) >= in_order or mixers[at] == mixers[len(chosen)]]
        if not able:
            return list(range(len(kinds)))
        ends = not lacking and len(chosen) >= _FEWEST - 2
        wanted = {last[0]} if ends else lacking or set(kinds)
        at = next((at for at in able if kinds[at] in wanted), able[0])
        at = able[0] if lacking & set(kinds[able[0] : at]) else at
        chosen.append(at)
        lacking.discard(kinds[at])
        if ends and kinds[at] == last[0]:
            last.pop(0)
    return chosen


def _held(model: nn.Module) -> list[nn.Module] | None:
    """The list in which a model holds its layers; None if it holds them otherwise."""
    layers = list(map(id, model.layers))
    lists = (value for module in model.modules() for value in module.values() if isinstance(value, list))
    return next((one for one in lists if list(map(id, one)) == layers), None)


@contextmanager
def only(model: nn.Module, few: FewLayers) -> Iterator[None]:
    """Within the context the model has the chosen layers alone."""
    held = _held(model)
    if few.all or held is None:
        yield
        return
    layers = list(held)
    held[:] = [layers[at] for at in few.chosen]
    try:
        yield
    finally:
        held[:] = layers


def serves(few: FewLayers, places: Sequence[StepPlace]) -> bool:
    """Whether every kept layer was seen in a forward pass, and the last in a backward pass."""
    seen = {(place.phase, place.layer) for place in places}
    needed = [(_FORWARD, at) for at in range(len(few.chosen))]
    return seen.issuperset([*needed, (_LOSS, 0), (_BACKWARD, len(few.chosen) - 1)])


class Measured(NamedTuple):
    """The memory of a step of few layers.

    `largest` has the largest amounts by their places; `saved` and `left` have those that a layer of each kind holds
    when the backward pass begins, and after its own.
    """

    largest: dict[StepPlace, Amount]
    saved: dict[int, Amount]
    left: dict[int, Amount]

    @classmethod
    def of(cls, few: FewLayers, places: Sequence[StepPlace], machine: Simulation) -> Measured:
        """Measure a simulated step; `places` are those of its primitives."""
        held = ({}, {}) if few.all else (_saved(few, places, machine), _left(few, places, machine))
        return cls(_peaks(places, machine), *held)

    def with_all(self, few: FewLayers, left_out: Amount) -> dict[StepPlace, Amount]:
        """Return the largest amounts of memory by their places, as they are with all layers.

        The layers left out hold `left_out` at any time: weights, sums of gradients, moments.
        """
        if few.all:
            return self.largest

        @cache
        def offset(place: StepPlace, layer: int) -> Amount:
            """The memory of the layers left out while the model is at `layer` and the few at `place` or near it."""
            before = _around(few.kinds, place.phase, layer)
            after = _around(few.kept, place.phase, place.layer)
            behind = few.gradients if place.phase == _UPDATE else self.left
            total = left_out
            for amounts, whole, part in zip((self.saved, behind), before, after, strict=True):
                for kind in whole.keys() | part.keys():
                    total = total.plus(amounts[kind], whole[kind] - part[kind])
            return total

        largest: dict[StepPlace, Amount] = {}
        layers: dict[int, list[int]] = defaultdict(list)
        for at in range(len(few.kinds)):
            layers[few.like(at)].append(at)
        for place, amount in self.largest.items():
            for layer in layers[place.layer] if place.phase in (_FORWARD, _BACKWARD) else [0]:
                whole = place._replace(layer=layer)
                largest[whole] = amount.plus(offset(place._replace(parameter=""), layer))
        return largest


def _around(kinds: Sequence[int], phase: str, layer: int) -> tuple[Counter[int], Counter[int]]:
    """The kinds of layers with saved tensors, and of those with gradients, while a step is at a layer."""
    if phase == _FORWARD:
        return Counter(kinds[:layer]) if layer >= 0 else Counter(), Counter()
    if phase == _LOSS:
        return Counter(kinds), Counter()
    return (Counter(kinds[:layer]), Counter(kinds[layer + 1 :])) if phase == _BACKWARD else (Counter(), Counter(kinds))


def places_of(built: TracedStep, evaluated: Sequence[Node], paths: Sequence[str]) -> list[StepPlace]:
    """Return the places in a step of layers at `paths` by the number of primitives evaluated before, from 0 on.

    A layer begins where one of its parameters, or a view of one, meets another array for the first time. Layers begin
    in order, so that a parameter that is read early or late does not count.
    """
    names = dict(built.names)
    layer_of = dict.fromkeys(names, -1)
    for position, path in enumerate(paths):
        layer_of |= {at: position for at, name in names.items() if name.startswith(f"{path}.")}
    place = StepPlace(_FORWARD, -1, "")
    places = [place]
    for at, node in enumerate(evaluated):
        known = [source.address for source in node.inputs if source.address in names]
        if at == built.update_from:
            place = StepPlace(_UPDATE, 0, "")
        elif known and len(known) == len(node.inputs):
            for output in node.outputs():
                names[output.address] = names[known[0]]
                layer_of[output.address] = layer_of[known[0]]
        elif known and at < built.update_from:
            layer = layer_of[known[0]]
            place = _next(place, layer, len(paths), forward=node in built.forward)
            if layer >= 0:
                place = place._replace(parameter=names[known[0]].removeprefix(f"{paths[layer]}."))
        places.append(place)
    return places


def _next(place: StepPlace, layer: int, layers: int, *, forward: bool) -> StepPlace:
    """The place after a parameter of a layer was read, or one outside of the layers, which has the position -1."""
    if forward and place.phase == _FORWARD:
        if layer == place.layer + 1:
            return StepPlace(_FORWARD, layer, "")
        return StepPlace(_LOSS, 0, "") if layer == -1 and place.layer == layers - 1 else place
    if not forward and layer >= 0:
        first = place.phase != _BACKWARD and layer == layers - 1
        if first or (place.phase == _BACKWARD and layer == place.layer - 1):
            return StepPlace(_BACKWARD, layer, "")
    return place


def _peaks(places: Sequence[StepPlace], machine: Simulation) -> dict[StepPlace, Amount]:
    """Return the largest amounts at every place."""
    count = len(places)
    made = machine.made
    born = [buffer.born for buffer in made]
    after = [1 + (count if buffer.died is None else buffer.died) for buffer in made]
    sizes = np.array([buffer.size for buffer in made], np.int64)
    starts = [at for at in range(count) if at == 0 or places[at] is not places[at - 1]]
    tops = []
    for amounts in (sizes, np.ones_like(sizes)):
        changes = np.zeros(count + 2, np.int64)
        np.add.at(changes, born, amounts)
        np.subtract.at(changes, after, amounts)
        tops.append(np.maximum.reduceat(changes.cumsum()[:count], starts).tolist())
    largest: dict[StepPlace, Amount] = {}
    for start, size, number in zip(starts, *tops, strict=True):
        before = largest.get(places[start], Amount(0, 0))
        largest[places[start]] = Amount(max(before.bytes, size), max(before.buffers, number))
    return largest


def _saved(few: FewLayers, places: Sequence[StepPlace], machine: Simulation) -> dict[int, Amount]:
    """The memory of a layer of each kind when the backward pass begins, its input included."""
    turn = next(at for at, place in enumerate(places) if place.phase == _BACKWARD)
    return _of_kinds(few.kept, _held_by_layers(places, machine, turn))


def _left(few: FewLayers, places: Sequence[StepPlace], machine: Simulation) -> dict[int, Amount]:
    """The memory of a layer of each kind after its backward pass: gradients, and tensors that late ones wait for."""
    lowest = min(place.layer for place in places if place.phase == _BACKWARD)
    end = next(at for at, place in enumerate(places) if place.phase == _BACKWARD and place.layer == lowest)
    held = _held_by_layers(places, machine, end)
    # The layer above the last one may not have ended.
    far = {at: amount for at, amount in held.items() if at > lowest + 1}
    return few.gradients | _of_kinds(few.kept, far)


def _held_by_layers(places: Sequence[StepPlace], machine: Simulation, moment: int) -> dict[int, Amount]:
    """The memory of the layers at a moment, by their positions, without that of queued operations."""
    held = {place.layer: Amount(0, 0) for place in places if place.phase == _FORWARD and place.layer >= 0}
    for buffer in machine.made:
        last = buffer.reads[-1] if buffer.reads else buffer.born
        if buffer.kind == "given" or buffer.born >= moment or (last < moment and buffer.died is not None):
            continue
        # A layer's input was made by the one before, and read last by the layer itself.
        forward = [at for at in (buffer.born, *buffer.reads) if places[at].phase == _FORWARD]
        place = places[max(forward, default=buffer.born)]
        if place.phase in (_FORWARD, _BACKWARD) and place.layer >= 0:
            held[place.layer] = held[place.layer].plus(Amount(buffer.size, 1))
    return held


def _of_kinds(kinds: Sequence[int], held: Mapping[int, Amount]) -> dict[int, Amount]:
    """The least amount of the layers of each kind, without the first and the last layer where there are others.

    A layer near the one that runs holds more: of inputs on the disk two are in memory.
    """
    amounts: dict[int, Amount] = {}
    for kind in {kinds[at] for at in held}:
        same = [at for at in held if kinds[at] == kind]
        inner = [at for at in same if 0 < at < len(kinds) - 1] or same
        amounts[kind] = Amount(*map(min, zip(*(held[at] for at in inner), strict=True)))
    return amounts
