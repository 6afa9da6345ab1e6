"""The compiled parts of a step: a micro-batch's loss and gradients, and the update that they go into."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import numpy as np
from mlx.utils import tree_map

from ..data import Batch
from ..lora.linear import factor_dtypes
from ..models.vision.frozen_tower import frozen_tower
from ..models.vision.inputs import VisionBatch
from ..models.vision.split import VisionArrays, vision_arrays
from ..ops.cross_entropy import linear_cross_entropy
from ..ops.segments import segments
from . import optimizer as updates
from .bundles import TOGETHER, Bundles
from .distributed import World
from .expert_updates import ActiveExperts, ExpertGradients
from .tree import leaves, number

# Numbers of positions that a step on images is compiled for, at most.
_PARTS = 4

# (inputs [B,T], targets [B,T], weights [B,T]) -> (sum of weighted losses, sum of weights), fp32 scalars; for a model
# that looks at images they come fourth, as models.vision.VisionArrays.
LossFunction = Callable[..., tuple[mx.array, mx.array]]
Arrays = tuple[mx.array, mx.array, mx.array, mx.array | None, VisionArrays | None]


def chunked_loss(backbone: Callable[..., mx.array], head: nn.Module | Callable[[mx.array], mx.array]) -> LossFunction:
    """Cross entropy that never holds [tokens, vocab], from a model split into `backbone` and `head`."""

    def loss(
        inputs: mx.array, targets: mx.array, weights: mx.array, *images: VisionArrays
    ) -> tuple[mx.array, mx.array]:
        hidden = backbone(inputs, *images)
        if images and "counted" in images[0]:
            at = images[0]["counted"]
            hidden, targets, weights = (x.reshape(-1, *x.shape[2:])[at] for x in (hidden, targets, weights))
        return linear_cross_entropy(head, hidden, targets, weights)

    return loss


def full_loss(model: nn.Module) -> LossFunction:
    """Cross entropy over the model's own logits, all of them held; for heads that cannot be split off."""

    def loss(inputs: mx.array, targets: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
        logits = model(inputs).astype(mx.float32)
        losses = nn.losses.cross_entropy(logits, targets)
        return (losses * weights).sum(), weights.sum()

    return loss


def arrays(batch: Batch, tower: Callable[[VisionBatch], VisionArrays] | None = None) -> Arrays:
    """The batch's fields as MLX arrays: inputs, targets, weights, segments (or None), images (or None).

    tower: one that does not train, which runs here instead of in the step.
    """
    packed = None if batch.segments is None else mx.array(batch.segments)
    images = None
    if batch.images is not None:
        images = vision_arrays(batch.images, tower)
        counted = counted_positions(batch.weights)
        images |= {} if counted is None else {"counted": mx.array(counted)}
    return mx.array(batch.inputs), mx.array(batch.targets), mx.array(batch.weights), packed, images


def counted_positions(weights: np.ndarray) -> np.ndarray | None:
    """The positions of weights other than 0, int32, ascending, made up with others to whole quarters of all, so that
    few shapes are compiled; None where that is all of them. Images and prompts count nothing, and need no logits."""
    quarter = max(weights.size // _PARTS, 1)
    counted = np.flatnonzero(weights)
    size = max(-(-len(counted) // quarter), 1) * quarter
    if size >= weights.size:
        return None
    others = np.flatnonzero(weights.reshape(-1) == 0)[: size - len(counted)]
    return np.sort(np.concatenate([counted, others])).astype(np.int32)


def loss_of(loss: LossFunction, batch: Arrays) -> tuple[mx.array, mx.array]:
    """`loss` of a batch: its sum, and the sum of the weights."""
    inputs, targets, weights, packed, images = batch
    with segments(packed):
        return loss(inputs, targets, weights) if images is None else loss(inputs, targets, weights, images)


def mean_loss_and_gradients(
    model: nn.Module,
    loss: LossFunction,
    batch: Arrays,
    parameters: Any = None,
    used: Callable[[Any], Any] = lambda parameters: parameters,
) -> tuple[mx.array, mx.array, Any]:
    """The sum of losses, the sum of weights, and the gradients of their quotient (of 0 where no target counts).

    They are gradients of `parameters`, of which `used` makes the model's; of the model's own trainable ones if None.
    """
    packed = batch[3]

    def mean(parameters: Any) -> tuple[mx.array, mx.array, mx.array]:
        model.update(used(parameters))
        total, weight = loss_of(loss, batch)
        return total / mx.where(weight > 0, weight, 1.0), total, weight

    trainable = model.trainable_parameters()
    try:
        with segments(packed):
            (_, total, weight), gradients = mx.value_and_grad(mean)(trainable if parameters is None else parameters)
    finally:
        # The gradient's tracers must not stay in the model: a compiled function's inputs are read from there.
        model.update(trainable)
    return total, weight, gradients


class Sums(NamedTuple):
    """Over the micro-batches since the last update; gradients is None before the first where none accumulate."""

    gradients: Any
    loss: mx.array
    weight: mx.array


class Step:
    """One training step of `model`, compiled once a batch shape, and its update, compiled once.

    micro_batch: adds a batch's gradients to those accumulated. sum_over_ranks: adds up what the ranks have. update:
    divides by the weights and lets the optimizer act. All are lazy: evaluate what they return together with the model
    and optimizer. With `expert_updates` active, update evaluates all but the experts' rows, which it then chooses
    (expert_updates.py).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: mlx.optimizers.Optimizer,
        loss: LossFunction,
        world: World,
        *,
        accumulate: int = 1,
        clip: float | None = None,
        expert_updates: str = "dense",
    ):
        self._model, self._optimizer, self._loss, self._world = model, optimizer, loss, world
        self._clip = clip
        self._weighted = accumulate > 1 or world.size > 1
        self._accumulates = accumulate > 1
        self._active = ActiveExperts(model, optimizer) if expert_updates == "active" else None
        parameters = model.trainable_parameters()
        separate = self._active.paths if self._active else ()
        self.bundles = Bundles(parameters, optimizer, separate, factor_dtypes(model))
        # The bundles as they are now, and the parameters that are parts of them.
        self._joined: tuple[list[mx.array], dict[str, mx.array]] = [], {}
        optimizer.init(self._parameters())
        self.tower = frozen_tower(model)
        random = mx.random.state
        self._micro_batch = partial(mx.compile, inputs=[model.state, random], outputs=[random])(self._trace_micro_batch)
        state = [optimizer.state]
        self._update = partial(mx.compile, inputs=state, outputs=state)(self._trace_update)

    def _parameters(self) -> Any:
        """The trainable parameters, bundles in place of their leaves: made anew where somebody replaced a leaf."""
        parameters = self._model.trainable_parameters()
        now = {path: leaf for path, leaf in leaves(parameters) if path in self.bundles.members}
        if not all(self._joined[1].get(path) is leaf for path, leaf in now.items()):
            self._joined = [bundle.join(now) for bundle in self.bundles.all], now
        return self.bundles.join(parameters, self._joined[0])

    @property
    def joined(self) -> list[mx.array]:
        """The bundles of parameters that the next call takes."""
        return self._parameters().get(TOGETHER, [])

    def zeros(self) -> Any:
        """Where accumulation starts: fp32 zeros, or None where every micro-batch is an update."""
        if not self._accumulates:
            return None
        return tree_map(lambda p: mx.zeros(p.shape, mx.float32), self._parameters())

    def micro_batch(self, batch: Batch, accumulated: Any) -> tuple[mx.array, mx.array, Any]:
        """Sum of losses, sum of weights, and `accumulated` plus the gradients of the sum of losses."""
        return self.on_arrays(arrays(batch, self.tower), accumulated)

    def on_arrays(self, batch: Arrays, accumulated: Any) -> tuple[mx.array, mx.array, Any]:
        """micro_batch, of a batch that is on the device."""
        return self._micro_batch(batch, accumulated, self._parameters())

    def sum_over_ranks(self, sums: Sums) -> Sums:
        """What update() takes, of this rank's sums. It is lazy: evaluated together with the backward pass that the
        sums come from, the first gradients travel while that pass goes on."""
        return Sums(*self._world.sum_tree(tuple(sums)))

    def update(self, gradients: Any, loss: mx.array, weight: mx.array) -> mx.array:
        """Step the optimizer with gradients / weight; returns the norm before clipping (or one that is not finite).

        All three are sums over the accumulated micro-batches and over the ranks (sum_over_ranks). A loss or norm that
        is not finite on any rank leaves model and optimizer as they are, on all of them.
        """
        norm, experts = self.begin_update(gradients, loss, weight)
        del gradients
        if experts is not None:
            mx.eval(self._model.trainable_parameters(), self._optimizer.state, norm, experts)
            if number(experts.healthy):
                self.finish_update(experts)
        return norm

    def begin_update(self, gradients: Any, loss: mx.array, weight: mx.array) -> tuple[mx.array, ExpertGradients | None]:
        """The update of all that is updated whatever the batch routed; the norm, and what experts still wait for."""
        parameters = self._parameters()
        if self._active is None:
            parameters, parts, norm = self._update(parameters, gradients, loss, weight)
            self._replace(parameters, parts)
            return norm, None
        rest, _ = self._active.split(parameters)
        rest, parts, norm, experts = self._update(rest, gradients, loss, weight)
        self._replace(rest, parts)
        return norm, ExpertGradients(*experts)

    def finish_update(self, experts: ExpertGradients) -> None:
        """The update of the experts that had tokens."""
        assert self._active is not None
        self._active.update(experts)

    def _replace(self, parameters: Any, parts: Any) -> None:
        """Give the model its new parameters, and remember the bundles that they are parts of."""
        self._model.update(parts)
        now = {path: leaf for path, leaf in leaves(parts) if path in self.bundles.members}
        self._joined = parameters.get(TOGETHER, []), now

    def _trace_micro_batch(self, batch: Arrays, accumulated: Any, parameters: Any) -> tuple[mx.array, mx.array, Any]:
        used = partial(self.bundles.part, used=True)
        loss, weight, gradients = mean_loss_and_gradients(self._model, self._loss, batch, parameters, used)
        if self._weighted:
            gradients = tree_map(lambda g: g.astype(mx.float32) * weight, gradients)
        if accumulated is not None:
            gradients = tree_map(mx.add, accumulated, gradients)
        return loss, weight, gradients

    def _trace_update(self, parameters: Any, gradients: Any, loss: mx.array, weight: mx.array) -> tuple[Any, ...]:
        """New parameters, the model's parts of them, the norm; where experts update by themselves, also what
        ActiveExperts.update needs."""
        divisor = mx.array(1.0)
        if self._weighted:
            divisor = mx.where(weight > 0, weight, 1.0)
        experts: dict[str, mx.array] = {}
        if self._active is not None:
            gradients, experts = self._active.split(gradients)
        if self._weighted:
            gradients = tree_map(lambda g: g / divisor, gradients)
        if self._active is None:
            parameters, norm = updates.apply(self._optimizer, parameters, gradients, mx.isfinite(loss), self._clip)
            return parameters, self.bundles.part(parameters), norm
        norm = updates.global_norm(experts).square() / divisor.square()
        if leaves(gradients):
            norm = norm + updates.global_norm(gradients).square()
        norm = mx.sqrt(norm)
        healthy = mx.logical_and(mx.isfinite(loss), mx.isfinite(norm))
        parameters, _ = updates.apply(self._optimizer, parameters, gradients, healthy, self._clip, norm)
        factor = (1.0 if self._clip is None else updates.clip_scale(norm, self._clip)) / divisor
        touched = self._active.touched(experts)
        return parameters, self.bundles.part(parameters), norm, (experts, touched, factor, healthy)
