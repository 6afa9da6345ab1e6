"""Computes the loss of a batch and its gradients by one layer after another, with the bits of a step as a whole.

The forward pass keeps the input of each layer. The backward pass takes the layers in reverse, recomputes each, and
collects the gradients of its trained parameters. A layer runs as it does in a step with checkpointed layers, with the
same operations and the same random keys. The parts of the model around its layers run compiled, with the features of a
vision tower that trains as their input, which are computed once before all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import UserError
from ...layers import logits_of
from ...lora.together import together
from ...models.vision.split import TowerInputs, blank_images, has_vision, run_tower, split_vision
from ...ops.experts import routing
from ...ops.functional import differentiated_once, undisturbed
from ...ops.random_state import drawing_with
from ...ops.segments import segments
from ...ops.tracing import trace
from ...patches.whole_rows import whole_rows
from ..batch_loss import Arrays, LossFunction, loss_of
from ..compiled import Compiled
from ..tree import arrays_at, holding, leaves, places
from ..updates.routers import RouterLoss, mean_with
from .layer_calls import Recorder, by_itself, passed_on
from .layer_functions import BatchInTrace, LayerFunction, lowest_layer, signature
from .store import ResidentLayers


def seen_by_tower(batch: Arrays) -> dict[str, mx.array] | None:
    """Return a batch's inputs of a vision tower that trains; None without pictures, or with their features."""
    return None if batch.images is None else batch.images.get("tower")


def with_pictures(batch: Arrays, pictures: Sequence[mx.array]) -> Arrays:
    """Return a batch with the tower's features of its pictures, and those of deeper layers."""
    if not pictures:
        return batch
    assert batch.images is not None
    images = {name: value for name, value in batch.images.items() if name != "tower"}
    return batch._replace(images=images | {"features": pictures[0], "deep": list(pictures[1:])})


class AroundLayers:
    """The parts of a model around its layers, compiled for batches of one kind.

    `recorded` has the calls of the layers once before() was traced.
    """

    def __init__(self, passes: LayerPasses, routers: RouterLoss | None):
        self._passes = passes
        self._routers = routers
        self.recorded = Recorder()
        state = [passes.model.state]
        self.tower = Compiled(self._tower, state)
        self.tower_again = Compiled(self._tower_again, state)
        self.before = Compiled(self._before, state)
        self.before_again = Compiled(self._before_again, state)
        self.behind = Compiled(self._behind, state)
        self.loss = cache(lambda loss: Compiled(partial(passes.loss_behind, loss), state))
        self._between = cache(lambda index: Compiled(partial(passes.entering, index), state))
        self._between_again = cache(lambda index: Compiled(partial(self._between_backward, index), state))

    def between(self, index: int, batch: Arrays, y: mx.array) -> mx.array:
        """Return the input of the layer at a position, given the output y of the one before."""
        if index not in self.recorded.changed:
            return y
        x: mx.array = self._between(index)(batch, y)
        return x

    def between_again(self, index: int, batch: Arrays, y: mx.array, dx: mx.array) -> tuple[mx.array, list[mx.array]]:
        """Return the gradients of y and of a tower's features, from that of between()."""
        if index not in self.recorded.changed:
            return dx, []
        dy, *d_pictures = self._between_again(index)(batch, y, dx)
        return dy, d_pictures

    def _between_backward(self, index: int, batch: Arrays, y: mx.array, dx: mx.array) -> list[mx.array]:
        def entering(y: mx.array, *pictures: mx.array) -> list[mx.array]:
            return [self._passes.entering(index, with_pictures(batch, pictures), y)]

        return mx.vjp(entering, [y, *self._differentiated(batch)], [dx])[1]

    def _differentiated(self, batch: Arrays) -> list[mx.array]:
        """Return the tower's features of the batch's pictures, if it trains."""
        images = batch.images or {}
        return [images["features"], *images["deep"]] if self._passes.in_tower and "features" in images else []

    def _tower(self, batch: Arrays, key: mx.array) -> tuple[list[mx.array], mx.array]:
        """Return the tower's features of the pictures of a batch, and the next key."""
        seen = seen_by_tower(batch)
        state = [key]
        assert seen is not None
        model: Any = self._passes.model
        with undisturbed(model), drawing_with(state):
            features, deep = run_tower(model.vision_tower, TowerInputs(**seen))
        return [features, *deep], state[0]

    def _tower_again(self, batch: Arrays, key: mx.array, gradients: list[mx.array]) -> list[mx.array]:

        def pictures(*trained: mx.array) -> list[mx.array]:
            with holding(self._passes.in_tower.values(), trained):
                return self._tower(batch, key)[0]

        return mx.vjp(pictures, arrays_at(self._passes.in_tower.values()), gradients)[1]

    def _before(self, batch: Arrays, key: mx.array) -> tuple[mx.array, mx.array, list[mx.array]]:
        """Return the hidden states before the layers, the next key, and the layers' other inputs."""
        self.recorded, key = self._passes.recorded(batch, key)
        return self.recorded.entered[0], key, self.recorded.arrays

    def _before_again(self, batch: Arrays, key: mx.array, dx: mx.array) -> tuple[list[mx.array], list[mx.array]]:
        """Return the gradients of the trained parameters outside the layers, and of the tower's features."""
        outer = arrays_at(self._passes.outer.values())

        def hidden(*differentiated: mx.array) -> list[mx.array]:
            with holding(self._passes.outer.values(), differentiated[: len(outer)]):
                return [self._passes.recorded(with_pictures(batch, differentiated[len(outer) :]), key)[0].entered[0]]

        gradients = mx.vjp(hidden, [*outer, *self._differentiated(batch)], [dx])[1]
        return gradients[: len(outer)], gradients[len(outer) :]

    def _behind(self, batch: Arrays, x: mx.array, key: mx.array, sides: list[mx.array]) -> tuple[Any, ...]:
        """Return the sums of losses and weights, the figures, and the gradients of the mean loss.

        These are of the hidden states x behind the layers, of the layers' side outputs, and of the trained parameters
        outside.
        """

        def mean(inputs: dict[str, Any]) -> tuple[mx.array, ...]:
            with holding(self._passes.outer.values(), inputs["outer"]):
                result = self._passes.loss_behind(self._passes.loss, batch, inputs["x"], key)
            return mean_with(self._routers, inputs["sides"], result)

        inputs = {"x": x, "sides": sides, "outer": arrays_at(self._passes.outer.values())}
        (_, total, weight, *figures), gradients = mx.value_and_grad(mean)(inputs)
        return total, weight, figures, gradients["x"], gradients.get("sides", []), gradients.get("outer", [])


# Is shown the output of the layer at a position, and going backward the gradient that reaches it, as
# watch(index, array, backward=...).
Watch = Callable[..., None]


@dataclass(eq=False)
class LayerPasses:
    """Computes losses and gradients of a model by layers; setup.training() has set it up with all layers checkpointed.

    `weights` keeps the layer inputs for the backward pass as well. `compute` computes the arrays of a pass before the
    next one begins; a plan only notes them. `between` is called before each layer, and may leave the pass by an error.
    The trained parameters outside the layers are `in_tower`, those of the vision tower, and `outer`, by path.
    """

    model: nn.Module
    loss: LossFunction
    weights: ResidentLayers
    compute: Callable[..., None] = mx.eval
    between: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._layers = self.weights.layers
        self._inputs = self.weights.inputs
        self._calls = self.weights.calls(self.compute)
        self._arounds: dict[Any, AroundLayers] = {}
        self._functions: dict[Any, LayerFunction] = {}
        self._signatures: dict[bool, list[Any]] = {}
        paths = {id(module): path for path, module in self.model.named_modules()}
        self._paths = [paths[id(layer)] for layer in self._layers]
        inside = tuple(f"{path}." for path in self._paths)
        trained = [path for path, _ in leaves(self.model.trainable_parameters())]
        tower = tuple(["vision_tower."] if has_vision(self.model) else ())
        self.outer = places(self.model, [path for path in trained if not path.startswith((*inside, *tower))])
        self.in_tower = places(self.model, [path for path in trained if path.startswith(tower)])
        self._lowest = lowest_layer(self.model, self._paths)

    def _along(self, order: Sequence[int]) -> Iterator[list[mx.array]]:
        for arrays in self.weights.along(order):
            if self.between is not None:
                self.between()
            yield arrays

    def served(self) -> AbstractContextManager[None]:
        """Within the context, a layer of the model reads its weights when it is called, whoever calls it."""
        return self._calls.watched()

    def check(self, *, packed: bool) -> None:
        """Check on a few tokens how the model calls its layers, without computing anything.

        UserError where the layers cannot be computed one by one.
        """
        recorder = Recorder()
        blank = mx.zeros((1, 8), mx.int32)

        def forward() -> None:
            if has_vision(self.model):
                split_vision(self.model, compare=False).backbone(blank, blank_images(self.model, blank))
            else:
                logits_of(self.model, blank)

        def serve(index: int, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            x = recorder(index, call, arguments, options)
            y = call(*arguments, **options)
            if not isinstance(y, mx.array) or y.shape != x.shape:
                raise UserError(
                    f"memory: {type(self._layers[index]).__name__} returns something else than hidden states, and a "
                    "step by layers hands these alone from layer to layer; leave memory out."
                )
            recorder.last = y
            return y

        batch = Arrays(blank, blank, mx.ones((1, 8)), blank if packed else None)
        with undisturbed(self.model), self._telling(batch, None, None, trains=False):
            with self._calls.served_by(serve):
                forward()
            if len(recorder.calls) != len(self._layers):
                raise UserError(
                    f"memory: this model calls {len(recorder.calls)} of its {len(self._layers)} layers, and a step by "
                    "layers calls each of them once; leave memory out."
                )
            self._check_between(forward, recorder)

    def _check_between(self, forward: Callable[[], Any], recorder: Recorder) -> None:
        """Refuse a model in which the layers, or the computation between them, read anything else with a gradient.

        `recorder` is the record of a run of `forward`, on a few tokens.
        """
        count = len(recorder.calls)
        hidden = recorder.entered[0]
        outer = self.outer.values()
        returned = [mx.full(hidden.shape, 0.5, hidden.dtype) for _ in range(count)]
        # The allowed dependency of each array: floats on nothing, hidden states on the output of the layer before.
        may = [None] * len(recorder.floats) + [index - 1 for index in recorder.changed]
        shapes = [*recorder.floats, *(recorder.entered[index] for index in recorder.changed)]
        for at, (allowed, like) in enumerate(zip(may, shapes, strict=True)):

            def one(*differentiated: mx.array, at: int = at) -> list[mx.array]:
                here = Recorder()

                def serve(index: int, *call: Any) -> mx.array:
                    here(index, *call)
                    here.last = differentiated[index]
                    return differentiated[index]

                with holding(outer, differentiated[count:]), self._calls.served_by(serve):
                    forward()
                return [[*here.floats, *(here.entered[index] for index in here.changed)][at]]

            _, gradients = mx.vjp(one, [*returned, *arrays_at(outer)], [mx.ones_like(like)])
            if any(bool(mx.any(gradient != 0)) for index, gradient in enumerate(gradients) if index != allowed):
                raise UserError(
                    "memory: between its layers, this model reads what earlier layers have computed, or what trains "
                    "outside its layers, and a step by layers has no gradient for that; leave memory out."
                )

    def evaluate(self, batch: Arrays, loss: LossFunction | None = None, watch: Watch | None = None) -> Any:
        """Compute a loss of a batch without a gradient; by default the loss that is trained.

        `watch` gets the outputs of layers.
        """
        key = mx.random.key(0)
        with self._telling(batch, None, None, trains=False) as told:
            around = self._around(batch, told, None)
            if seen_by_tower(batch):
                pictures, key = around.tower(batch, key)
                batch = with_pictures(batch, pictures)
            x, key, others = around.before(batch, key)
            reading = self._along(range(len(self._layers)))
            for index in range(len(self._layers)):
                x = around.between(index, batch, x)
                x, _, key = self._function(index, around, told).forward(next(reading), x, others, told, key)
                self.compute(x, key)
                if watch is not None:
                    watch(index, x, backward=False)
            return around.loss(loss or self.loss)(batch, x, key)

    def gradients(
        self,
        batch: Arrays,
        parameters: Any,
        key: mx.array,
        routers: RouterLoss | None = None,
        lengths: mx.array | None = None,
        watch: Watch | None = None,
    ) -> tuple[Any, ...]:
        """Compute the results of batch_loss.mean_loss_and_gradients().

        The model uses `parameters` in the place of its trainable ones, and the batch draws from `key`. With `routers`,
        `lengths` [B] counts the positions of each row that hold tokens. `watch` gets the outputs of layers.
        """
        trainable = self.model.trainable_parameters()
        try:
            with undisturbed(self.model), self._telling(batch, routers, lengths, trains=True) as told:
                self.model.update(parameters)
                return self._both_passes(batch, self._around(batch, told, routers), told, key, watch)
        finally:
            # Arrays in lists within a module, which undisturbed() leaves.
            self.model.update(trainable)

    def _both_passes(
        self, batch: Arrays, around: AroundLayers, told: BatchInTrace, first_key: mx.array, watch: Watch | None
    ) -> tuple[Any, ...]:
        count = len(self._layers)
        lowest = self._lowest
        reading = self._along([*range(count), *reversed(range(lowest, count))])
        seen = batch
        d_pictures = []
        key = first_key
        if seen_by_tower(batch):
            pictures, key = around.tower(seen, key)
            batch = with_pictures(batch, pictures)
            d_pictures = [mx.zeros_like(picture) for picture in pictures]
            self.compute(pictures)
        before_key = key
        x, key, others, sides, records = self._forward(batch, around, told, key, reading, watch)
        total, weight, figures, dx, d_sides, d_outer = around.behind(batch, x, key, sides)
        self.compute(total, weight, figures, dx, d_sides, d_outer)
        del x
        gradients: dict[str, mx.array] = {}
        for index in reversed(range(lowest, count)):
            function = self._function(index, around, told)
            key, number = records.pop()
            y = self._inputs.take()
            if watch is not None:
                watch(index, dx, backward=True)
            cut = len(d_sides) - number
            d_sides, d_own = d_sides[:cut], d_sides[cut:]
            x = around.between(index, batch, y)
            dx, d_parameters = function.backward(next(reading), x, others, told, key, dx, d_own)
            # The lowest layer's input needs no gradient, unless something before it trains.
            needed = index > lowest or d_outer or d_pictures
            if needed:
                dx, more = around.between_again(index, batch, y, dx)
                d_pictures = _sums(d_pictures, more)
            self._computed(index, d_parameters, [dx, d_pictures] if needed else [])
            gradients |= {
                f"{self._paths[index]}.{path}": g for path, g in zip(function.trained, d_parameters, strict=True)
            }
            del x, y
        if d_outer or d_pictures:
            more, of_pictures = around.before_again(batch, before_key, dx)
            d_outer, d_pictures = _sums(d_outer, more), _sums(d_pictures, of_pictures)
            self.compute(d_outer, d_pictures)
        in_tower = [mx.zeros_like(array) for array in arrays_at(self.in_tower.values())]
        if d_pictures:
            in_tower = around.tower_again(seen, first_key, d_pictures)
        self.compute(in_tower)
        if any(map(self.weights.stays, range(count))):
            mx.eval(gradients)
        gradients |= zip(self.outer, d_outer, strict=True)
        gradients |= zip(self.in_tower, in_tower, strict=True)
        return total, weight, tree_unflatten(list(gradients.items())), *figures

    def _computed(self, index: int, *arrays: Any) -> None:
        """Compute a layer's output, or only begin to where the next layer may be begun meanwhile."""
        (mx.async_eval if self.weights.stays(index) else self.compute)(*arrays)

    def _forward(
        self,
        batch: Arrays,
        around: AroundLayers,
        told: BatchInTrace,
        key: mx.array,
        reading: Iterator[list[mx.array]],
        watch: Watch | None,
    ) -> tuple[mx.array, mx.array, list[mx.array], list[mx.array], list[tuple[mx.array, int]]]:
        """Compute the layers, of which the first draws from the key after `key`.

        Return the output of the last layer, the key behind it, the inputs that all layers share, their side outputs,
        and for the backward pass the key of each layer and how many side outputs it has.
        """
        x, key, others = around.before(batch, key)
        self._inputs.clear()
        records: list[tuple[mx.array, int]] = []
        sides: list[mx.array] = []
        for index in range(len(self._layers)):
            function = self._function(index, around, told)
            entering = around.between(index, batch, x)
            y, more, next_key = function.forward(next(reading), entering, others, told, key)
            if index >= self._lowest:
                self._inputs.keep(x, (y, more, next_key))
                records.append((key, len(more)))
            self._computed(index, y, more, next_key)
            if watch is not None:
                watch(index, y, backward=False)
            sides += more
            x, key = y, next_key
        return x, key, others, sides, records

    def recorded(self, batch: Arrays, key: mx.array) -> tuple[Recorder, mx.array]:
        """Run the model with layers that are only recorded; return these, and the key before the first of them."""
        recorder = Recorder()
        keys = []

        def serve(*call: Any) -> Any:
            keys.append(state[0])
            return recorder(*call)

        state = [key]
        with undisturbed(self.model), drawing_with(state), self._calls.served_by(serve):
            loss_of(self.loss, batch)
        return recorder, keys[0]

    def entering(self, entered: int, batch: Arrays, y: mx.array) -> mx.array:
        """Return the input of the layer at a position, given the output y of the one before."""
        entering: list[mx.array] = []

        def serve(index: int, _call: Any, arguments: tuple[Any, ...], _options: Any) -> Any:
            if index == entered:
                entering.append(arguments[0])
            return y if index == entered - 1 else arguments[0]

        with undisturbed(self.model), drawing_with([mx.random.key(0)]), self._calls.served_by(serve):
            loss_of(self.loss, batch)
        return entering[0]

    def loss_behind(self, loss: LossFunction, batch: Arrays, x: mx.array, key: mx.array) -> tuple[mx.array, ...]:
        """Compute the loss from the last hidden states x, with `key` for dropout behind them."""
        last = len(self._layers) - 1
        state = [key]

        def serve(index: int, *call: Any) -> Any:
            if index < last:
                return passed_on(index, *call)
            state[0] = key
            return x

        with undisturbed(self.model), drawing_with(state), self._calls.served_by(serve):
            return loss_of(loss, batch)

    @contextmanager
    def _telling(
        self, batch: Arrays, routers: RouterLoss | None, lengths: mx.array | None, *, trains: bool
    ) -> Iterator[BatchInTrace]:
        """Enter the contexts around the trace of a step or of an evaluation; yield the arrays that the trace holds."""
        with ExitStack() as stack:
            stack.enter_context(segments(batch.segments))
            stack.enter_context(self._calls.served_by(by_itself))
            if trains:
                stack.enter_context(whole_rows())
                stack.enter_context(differentiated_once())
                stack.enter_context(together(self.model))
            if routers is not None and lengths is not None:
                stack.enter_context(routing.watching(lengths, batch.inputs.shape[1], trained=routers.trained))
            watch = trace.current().routers
            yield BatchInTrace(batch.segments, None if watch is None else watch.real)

    def _around(self, batch: Arrays, told: BatchInTrace, routers: RouterLoss | None) -> AroundLayers:
        shapes = tuple((path, array.shape, array.dtype) for path, array in leaves(batch) if array is not None)
        kind = shapes, self.model.training, told.real is not None, trace.current().whole_rows
        if kind not in self._arounds:
            self._arounds[kind] = AroundLayers(self, routers)
        return self._arounds[kind]

    def _function(self, index: int, around: AroundLayers, told: BatchInTrace) -> LayerFunction:
        trains = self.model.training
        if trains not in self._signatures:
            self._signatures[trains] = [signature(layer) for layer in self._layers]
        collects = told.real is not None
        call = around.recorded.calls[index]
        kind = self._signatures[trains][index], call, collects, told.documents is not None, trace.current().whole_rows
        if kind not in self._functions:
            self._functions[kind] = LayerFunction(self._layers[index], call, collects)
        return self._functions[kind]


def _sums(arrays: list[mx.array], others: list[mx.array]) -> list[mx.array]:
    """Return the sums of gradients, of which the others may be none."""
    return [one + other for one, other in zip(arrays, others, strict=True)] if others else arrays
