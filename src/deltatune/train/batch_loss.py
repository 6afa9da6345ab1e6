"""Computes the loss of a batch and its gradients, for a step, an evaluation or a plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..data import Batch
from ..layers import logits_of
from ..lora.together import together
from ..models.vision.inputs import VisionBatch
from ..models.vision.split import VisionArrays, vision_arrays
from ..ops.cross_entropy import linear_cross_entropy
from ..ops.experts import routing
from ..ops.functional import differentiated_once, undisturbed
from ..ops.segments import segments
from ..ops.tracing import side_outputs
from .tree import from_host
from .updates.routers import RouterLoss, mean_with

# A step on images is compiled for at most this many numbers of positions.
_POSITION_COUNTS = 4

# (inputs [B,T], targets [B,T], weights [B,T]) -> (sum of weighted losses, sum of weights), as fp32 scalars. A vision
# model's loss takes the images as a fourth argument, VisionArrays. A loss of preferences or of rollouts takes their
# arrays as its last argument, and returns a third array, [2, figures] (preferences/objectives.py, policy_loss.py).
LossFunction = Callable[..., tuple[mx.array, ...]]


class Arrays(NamedTuple):
    """The arrays of a batch of B rows of T tokens: tokens, targets, and fp32 weights in the loss, each [B, T].

    `segments` [B, T] are the documents of packed rows. A loss of preferences or rollouts reads `judged`, by name.
    """

    inputs: mx.array
    targets: mx.array
    weights: mx.array
    segments: mx.array | None = None
    images: VisionArrays | None = None
    judged: dict[str, mx.array] | None = None


def chunked_loss(backbone: Callable[..., mx.array], head: nn.Module | Callable[[mx.array], mx.array]) -> LossFunction:
    """Make a cross-entropy loss that never holds the logits of all tokens at once.

    `backbone` is the model up to its head: inputs [B, T] (and images) -> hidden states [B, T, D].
    """

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
    """Make a cross-entropy loss over all logits of a model at once, for one with a head that cannot be split off."""

    def loss(inputs: mx.array, targets: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
        losses = nn.losses.cross_entropy(logits_of(model, inputs).astype(mx.float32), targets)
        return (losses * weights).sum(), weights.sum()

    return loss


def arrays(batch: Batch, tower: Callable[[VisionBatch], VisionArrays] | None = None) -> Arrays:
    """Convert a batch to MLX arrays; a frozen vision `tower` runs here, and not in the step."""
    packed = None if batch.segments is None else mx.array(batch.segments)
    images = None
    if batch.images is not None:
        images = vision_arrays(batch.images, tower)
        counted = counted_positions(batch.weights)
        images |= {} if counted is None else {"counted": mx.array(counted)}
    beside = batch.preferences or batch.rollouts
    judged = None if beside is None else {name: mx.array(array) for name, array in beside.arrays().items()}
    inputs, targets, weights = from_host(batch.inputs, batch.targets, batch.weights)
    return Arrays(inputs, targets, weights, packed, images, judged)


def counted_positions(weights: np.ndarray) -> np.ndarray | None:
    """Return the positions that need logits in the flattened batch, ascending, int32; None if all do.

    They are those with one of the `weights` [B, T] other than 0, which excludes images and prompts. Others fill the
    result up to a multiple of a quarter of all, so that only few shapes are compiled.
    """
    quarter = max(weights.size // _POSITION_COUNTS, 1)
    counted = np.flatnonzero(weights)
    size = max(-(-len(counted) // quarter), 1) * quarter
    if size >= weights.size:
        return None
    others = np.flatnonzero(weights.reshape(-1) == 0)[: size - len(counted)]
    return np.sort(np.concatenate([counted, others])).astype(np.int32)


def loss_of(loss: LossFunction, batch: Arrays) -> tuple[mx.array, ...]:
    """Compute `loss` on a batch; return the sum of losses, the sum of weights, and a preference loss's figures."""
    more = [arrays for arrays in (batch.images, batch.judged) if arrays is not None]
    with segments(batch.segments):
        return loss(batch.inputs, batch.targets, batch.weights, *more)


def mean_loss_and_gradients(
    model: nn.Module,
    loss: LossFunction,
    batch: Arrays,
    parameters: Any = None,
    routers: RouterLoss | None = None,
    lengths: mx.array | None = None,
) -> tuple[Any, ...]:
    """Return a batch's sum of losses, its sum of weights, and the gradients of their quotient; 0 if all weights are.

    A preference loss and routers add their figures, as one array [2, figures]. The gradients are by `parameters`, which
    the model uses in the place of its trainable parameters. With `routers`, `lengths` [B] counts each row's tokens.
    """

    def mean(parameters: Any) -> tuple[mx.array, ...]:
        model.update(parameters)
        with side_outputs.collecting(routers is not None) as sums:
            result = loss_of(loss, batch)
        return mean_with(routers, sums, result)

    trainable = model.trainable_parameters()
    watching: Any = nullcontext()
    if routers is not None and lengths is not None:
        watching = routing.watching(lengths, batch.inputs.shape[1], trained=routers.trained)
    # The tracers of the gradient must not stay in the model, from which compiled functions read their inputs: in
    # trainable arrays, and in others that a layer replaces while it runs, as Gemma 3n clips weights.
    try:
        with undisturbed(model), segments(batch.segments), watching, differentiated_once(), together(model):
            (_, total, weight, *figures), gradients = mx.value_and_grad(mean)(
                trainable if parameters is None else parameters
            )
    finally:
        # Arrays in lists within a module, which undisturbed() leaves.
        model.update(trainable)
    return total, weight, gradients, *figures
