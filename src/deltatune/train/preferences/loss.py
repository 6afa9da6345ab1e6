"""Makes the loss function of a training step out of a preference loss and the model's log-probabilities."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ...layers import logits_of
from ...models.vision.split import VisionArrays
from ...ops.cross_entropy import linear_token_losses
from ...options.config import TrainConfig
from .objectives import Objective, PreferenceArrays, Scored, answers_of

# (inputs [B, T], targets [B, T], and a vision model's images) -> the cross-entropy of every target, [B, T] in fp32.
TokenLosses = Callable[..., mx.array]


def chunked_token_losses(
    backbone: Callable[..., mx.array], head: nn.Module | Callable[[mx.array], mx.array]
) -> TokenLosses:
    """Return the tokens' losses of a model in two parts; the logits of all tokens are never held at once.

    `backbone` maps inputs [B, T] (and images) to hidden states [B, T, D], and `head` those to logits.
    """

    def losses(inputs: mx.array, targets: mx.array, *images: VisionArrays) -> mx.array:
        hidden = backbone(inputs, *images)
        if not images or "counted" not in images[0]:
            return linear_token_losses(head, hidden, targets)
        at = images[0]["counted"]
        counted_losses = linear_token_losses(head, hidden.reshape(-1, hidden.shape[-1])[at], targets.reshape(-1)[at])
        return mx.put_along_axis(mx.zeros(targets.size), at, counted_losses, axis=0).reshape(targets.shape)

    return losses


def full_token_losses(model: nn.Module) -> TokenLosses:
    """Return the tokens' losses of a model with a head that cannot be split off, from all of its logits at once."""

    def losses(inputs: mx.array, targets: mx.array) -> mx.array:
        return nn.losses.cross_entropy(logits_of(model, inputs).astype(mx.float32), targets)

    return losses


def preference_loss(
    token_losses: TokenLosses, objective: Objective, config: TrainConfig
) -> Callable[..., tuple[mx.array, mx.array, mx.array]]:
    """Make a loss function for the training step.

    It takes inputs, targets, weights, a vision model's images, and at the end the arrays of the batch's preferences. It
    returns the sum of the preferences' losses, their number, and [2, figures]: the sums of the figures in
    objective.figures, and of how many answers each is the sum.
    """

    def loss(
        inputs: mx.array, targets: mx.array, weights: mx.array, *more: PreferenceArrays
    ) -> tuple[mx.array, mx.array, mx.array]:
        *images, preferences = more
        losses = token_losses(inputs, targets, *images)
        answers = answers_of(losses, weights, preferences)
        scored = objective.score(answers, config)
        present = answers.present
        # A blank preference counts nothing, and an infinite loss of one must not become NaN.
        total = mx.where(present > 0, scored.losses, 0.0).sum()
        # mlx.compile fails if an output is computed twice, so the count is computed in one place.
        return total, answers.number, mx.stop_gradient(_figures(scored, present))

    return loss


def _figures(scored: Scored, present: mx.array) -> mx.array:
    """Return sums and counts of the reported figures, [2, figures]."""
    counted = scored.counted * present[:, None]
    both = counted[:, 0] * counted[:, 1]
    chosen, rejected = counted[:, 0], counted[:, 1]
    right = (scored.rewards[:, 0] > scored.rewards[:, 1]).astype(mx.float32)
    values = (
        (scored.rewards[:, 0], chosen),
        (scored.rewards[:, 1], rejected),
        (right, both),
        (scored.log_probabilities[:, 0], chosen),
        (scored.log_probabilities[:, 1], rejected),
        *((figure, present) for figure in scored.more),
    )
    return mx.stack([mx.stack([(value * weight).sum(), weight.sum()]) for value, weight in values], axis=1)
