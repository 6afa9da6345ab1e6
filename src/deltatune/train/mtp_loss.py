"""Makes the loss of a run that trains the multi-token-prediction head, beside the model or alone."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..models.adapted_base import two_ahead
from ..models.head import PIECE
from ..ops import segments
from ..ops.cross_entropy import linear_cross_entropy
from ..options.config import TrainConfig
from .batch_loss import LossFunction

#: The loss of the head per token, and in an evaluation the share of its tokens that the model would accept.
FIGURES = ("mtp_loss", "mtp_accepted")


def mtp_loss(model: nn.Module, parts: tuple[Callable[..., mx.array], nn.Module], config: TrainConfig) -> LossFunction:
    """Make the loss, whose third result are the sums and the weights of FIGURES, [2, 2].

    At a position the head reads the model's hidden state and the next token, and predicts the token after it through
    the model's own output head. That token counts where it counts in the model's loss and is of the same document.

    With the option `mtp: true` the loss is the model's alone, as in any other run, while the gradient is that of the
    model's loss plus `mtp_weight` times the head's sum of losses, over the same number of tokens. With `only` both are
    the head's. `parts` are the backbone and the output head of the model (models/head.py).

    Source: https://arxiv.org/abs/2412.19437, section 2.2.
    """
    backbone, head = parts
    ahead = two_ahead(model)

    def loss(inputs: mx.array, targets: mx.array, weights: mx.array) -> tuple[mx.array, ...]:
        hidden = backbone(inputs)
        drafted = ahead(hidden if config.mtp_trunk_gradient else mx.stop_gradient(hidden), targets)
        after = _next(targets)
        counted = _next(weights) * _same_document(targets)
        of_head, count = linear_cross_entropy(head, drafted, after, counted)
        accepted = [mx.array(0.0), mx.array(0.0)]
        if not model.training:
            accepted = [((_likeliest(head, drafted) == _next(_likeliest(head, hidden))) * counted).sum(), count]
        figures = mx.stop_gradient(mx.array([[of_head, accepted[0]], [count, accepted[1]]]))
        if config.mtp == "only":
            return of_head, count, figures
        total, weight = linear_cross_entropy(head, hidden, targets, weights)
        # The value is the model's loss, and the gradient that of both.
        added = config.mtp_weight * of_head
        return total + (added - mx.stop_gradient(added)), weight, figures

    return loss


def _next(array: mx.array) -> mx.array:
    """Return each position's right neighbour in [B, T]; the last has 0."""
    return mx.pad(array[:, 1:], [(0, 0), (0, 1)])


def _same_document(targets: mx.array) -> mx.array:
    """Return where a position's right neighbour belongs to its document, [B, T]; the last has none."""
    documents = segments.current()
    documents = mx.zeros(targets.shape, mx.int32) if documents is None else documents
    return mx.pad(documents[:, 1:] == documents[:, :-1], [(0, 0), (0, 1)])


def _likeliest(head: nn.Module, hidden: mx.array) -> mx.array:
    """Return the likeliest token at each position [B, T] of hidden states, whose logits exist a piece at a time."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    tokens: list[mx.array] = []
    for start in range(0, rows.shape[0], PIECE):
        piece = mx.depends([rows[start : start + PIECE]], tokens[-1:])[0]
        tokens.append(head(piece).argmax(axis=-1))
    return mx.concatenate(tokens).reshape(hidden.shape[:-1])
