"""Compiles the parts of a training step: loss and gradients of a micro-batch, and the optimizer's update.

The training loop (loop.py) and the memory plan (plan/traced_step.py) run it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
from mlx.utils import tree_map

from ..data import Batch
from ..lora.linear import factor_dtypes
from ..models.vision.split import CACHE_BYTES, frozen_tower
from ..ops.pointwise import adam
from ..ops.random_state import drawing_with
from .batch_loss import Arrays, LossFunction, arrays, mean_loss_and_gradients
from .compiled import Compiled
from .distributed import World
from .launcher import PATIENCE, Launcher
from .tree import leaves, places
from .updates import optimizer as updates
from .updates.bundles import TOGETHER, Bundles
from .updates.routers import RouterLoss, real_lengths, weight_or_one


class Sums(NamedTuple):
    """The sums of gradients, weighted losses and target weights over the micro-batches since the last update."""

    # A tree; None at the start if every micro-batch is an update.
    gradients: Any
    loss: mx.array
    weight: mx.array


class MicroBatch(NamedTuple):
    """The results of a micro-batch: its sums of weighted losses and of target weights, gradients and figures."""

    loss: mx.array
    weight: mx.array
    # The tree of summed gradients, those of this micro-batch among them. If every micro-batch is an update on a single
    # rank, they are those of the mean loss.
    gradients: Any
    # A preference loss's figures and then the routers', [2, figures] in one array; no array without either.
    figures: list[mx.array]


class StepMachine(NamedTuple):
    """The resources of the machine that a step uses.

    `launcher` evaluates the results while the main thread builds on them, or gives them up: no result is then one of
    several that an operation computes together. Features of a frozen vision tower take `feature_bytes` of main memory.
    """

    launcher: Launcher | None = None
    feature_bytes: int = CACHE_BYTES


class Step:
    """The training step of a model.

    micro_batch() accumulates gradients, sum_over_ranks() adds them up over the ranks, and update() uses them.
    micro_batch() is compiled once for each batch shape, update() once. The results are lazy: evaluate them together
    with the model and the optimizer's state.

    The optimizer is initialised here. By default each micro-batch makes an update, without clipping, in the main
    thread, with 1 GiB for features of images. The next micro-batch draws from the key in the list `random`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: mlx.optimizers.Optimizer,
        loss: LossFunction,
        world: World,
        *,
        update: updates.UpdateOptions | None = None,
        routers: RouterLoss | None = None,
        machine: StepMachine | None = None,
    ):
        update = update or updates.UpdateOptions()
        machine = machine or StepMachine()
        self.model = model
        self.optimizer = optimizer
        self._loss = loss
        self._world = world
        self._clip = update.clip
        self.routers = routers
        self._weighted = update.accumulate > 1 or world.size > 1
        self._accumulates = update.accumulate > 1
        parameters = model.trainable_parameters()
        self.bundles = Bundles(parameters, optimizer, factor_dtypes(model), update.undecayed)
        # Where the model holds each trainable parameter: walking through all modules at each step takes milliseconds.
        self._places = places(model, [path for path, _ in leaves(parameters)])
        # The current bundles, and the model's parameters that are parts of them, by path.
        self._joined: tuple[list[mx.array], dict[str, mx.array]] = [], {}
        optimizer.init(self.parameters())
        self.tower = frozen_tower(model, machine.feature_bytes)
        self.random = [mx.random.key(0)]
        self._undone: Any = None
        self._launcher = machine.launcher
        read = [model.state, self.random]
        moments = [optimizer.state]
        before = None if machine.launcher is None else machine.launcher.before_compiling
        self._micro_batch = Compiled(self._trace_micro_batch, read, [self.random], before)
        self._update = Compiled(self._trace_update, moments, moments, before)

    def parameters(self) -> Any:
        """Return the trainable parameters in joined form; bundles are made again if a parameter has been replaced."""
        members = self.bundles.members
        now = {path: place.array for path, place in self._places.items() if path in members}
        if not all(self._joined[1].get(path) is array for path, array in now.items()):
            self._joined = [bundle.join(now) for bundle in self.bundles.all], now
        separate = {path: place.array for path, place in self._places.items() if path not in members}
        return self.bundles.join(separate, self._joined[0])

    def settle(self) -> None:
        """Compute parameters in bundles, which a step leaves lazy, in the calling thread.

        Left lazy, they belong to the main thread's queue, and computing them would wait for everything queued there.
        """
        if self._launcher is not None:
            self._launcher.settle(PATIENCE)
        joined = self.joined
        parts = dict(leaves(self.bundles.part({TOGETHER: joined})))
        mx.eval(parts)
        self._replace({TOGETHER: joined}, parts)

    @property
    def joined(self) -> list[mx.array]:
        """The bundles of parameters that the next step reads."""
        return self.parameters().get(TOGETHER, [])

    def zeros(self) -> Any:
        """Return the start of an accumulation: fp32 zeros, or None if every micro-batch is an update."""
        return tree_map(lambda p: mx.zeros(p.shape, mx.float32), self.parameters()) if self._accumulates else None

    def micro_batch(self, batch: Batch, accumulated: Any) -> MicroBatch:
        """Compute the loss of a batch, and add its gradients to `accumulated`."""
        lengths = None if self.routers is None else real_lengths(batch)
        return self.on_arrays(arrays(batch, self.tower), accumulated, lengths)

    def on_arrays(self, batch: Arrays, accumulated: Any, lengths: mx.array | None = None) -> MicroBatch:
        """micro_batch() for arrays that are on the device already and, with routers, the lengths of the rows, [B]."""
        loss, weight, gradients, *figures = self._micro_batch(batch, accumulated, self.parameters(), lengths)
        return MicroBatch(loss, weight, gradients, figures)

    def sum_over_ranks(self, sums: Sums, figures: list[mx.array]) -> Sums:
        """Add up the sums of all ranks, lazily; `figures` are those of the last micro-batch.

        If the result is evaluated together with the backward pass, the first gradients travel while that pass runs.
        """
        sums_here: Any = tuple(sums)
        if self.routers is not None and self.routers.wait_for_ranks:
            # All ranks must send in the same order, and the routers' sums travel in the forward pass.
            sums_here = tree_map(lambda leaf: mx.depends(leaf, figures), sums_here)
        return Sums(*self._world.sum_tree(sums_here))

    def update(self, gradients: Any, loss: mx.array, weight: mx.array) -> mx.array:
        """Make an optimizer step with gradients / weight, unless the loss or the norm is not finite on some rank.

        The arguments are summed over micro-batches and ranks (sum_over_ranks). Returns the Euclidean norm of
        gradients / weight before clipping.
        """
        parameters, parts, norm = self._update(self.parameters(), gradients, loss, weight)
        self._replace(parameters, parts)
        return norm

    def before_update(self) -> Any:
        """Return the parameters, bundles and moments that the next update replaces; undo() can put them back."""
        parameters = {path: place.array for path, place in self._places.items()}
        return parameters, self._joined, tree_map(lambda leaf: leaf, self.optimizer.state)

    def undo(self, before: Any) -> None:
        """Put back the arrays that updates have replaced since before_update()."""
        # Another thread may be evaluating the replaced arrays, so they must not be given up here.
        self._undone = self.before_update()
        parameters, self._joined, moments = before
        for path, array in parameters.items():
            self._places[path].array = array
        updates.restore(self.optimizer, moments)

    def _replace(self, parameters: Any, parts: dict[str, mx.array]) -> None:
        """Set the model's parameters to `parts`, by path, and remember the bundles that they are parts of.

        Parts of bundles stay lazy until something reads them, which no step does.
        """
        for path, part in parts.items():
            self._places[path].array = part
        now = {path: part for path, part in parts.items() if path in self.bundles.members}
        self._joined = parameters.get(TOGETHER, []), now

    def _trace_micro_batch(
        self, batch: Arrays, accumulated: Any, parameters: Any, lengths: mx.array | None
    ) -> tuple[Any, ...]:
        used = self.bundles.part(parameters, used=True)
        with drawing_with(self.random):
            loss, weight, gradients, *figures = mean_loss_and_gradients(
                self.model, self._loss, batch, used, self.routers, lengths
            )
        if self._launcher is not None:
            loss, weight, figures, self.random[0] = tree_map(mx.contiguous, (loss, weight, figures, self.random[0]))
        return loss, weight, self.added(accumulated, gradients, weight, parameters), *figures

    def added(self, accumulated: Any, gradients: Any, weight: mx.array, parameters: Any) -> Any:
        """Return `accumulated` plus the gradients of the sum of losses, joined as `parameters` are."""
        gradients = self.bundles.join_gradients(gradients, parameters)
        if self._weighted:
            gradients = tree_map(lambda g: g.astype(mx.float32) * weight_or_one(weight), gradients)
        if accumulated is not None:
            gradients = tree_map(mx.add, accumulated, gradients)
        # A product's gradient is transposed, and each kernel of the update that reads it would copy it first.
        return (
            tree_map(mx.contiguous, gradients) if self._launcher is not None or adam.OPERATOR.is_for_here else gradients
        )

    def _trace_update(self, parameters: Any, gradients: Any, loss: mx.array, weight: mx.array) -> tuple[Any, ...]:
        """Return the new parameters in joined form, the same in the model's form by path, and the norm."""
        optimizer = self.optimizer
        if self._weighted:
            divisor = weight_or_one(weight)
            gradients = tree_map(lambda g: g / divisor, gradients)
        healthy = mx.isfinite(loss)
        parameters, norm = updates.apply(optimizer, parameters, gradients, healthy, self._clip, self.bundles.decays)
        if self._launcher is not None:
            parameters, norm, state = tree_map(mx.contiguous, (parameters, norm, optimizer.state))
            updates.restore(optimizer, state)
        return parameters, dict(leaves(self.bundles.part(parameters))), norm
