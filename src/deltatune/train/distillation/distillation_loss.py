"""Makes the loss of distillation, the divergence of the model from the teacher on the answers of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import mlx.nn as nn

from ...errors import UserError
from ...models.head import split_head
from ...ops.divergence import linear_divergence
from ...ops.tracing import side_outputs
from ...options.config import TrainConfig
from ..batch_loss import LossFunction


def distillation_loss(
    student: tuple[Callable[..., mx.array], nn.Module], teacher: nn.Module, config: TrainConfig, *, compare: bool
) -> LossFunction:
    """Make the loss; its gradient does not reach the teacher, and no logits of all tokens exist, of either model.

    `student` is its backbone and its head (models/head.py); the teacher is patched as it is. With `compare`, a
    computation checks that the teacher's parts agree with the whole, and reads its weights. A teacher that cannot be
    split before its head, or has another number of logits, is a UserError.
    """
    backbone, head = student
    split = split_head(teacher, compare=compare)
    if split.backbone is None or split.head is None:
        raise UserError(f"teacher {config.teacher}: {split.reason}")
    teacher_backbone, teacher_head = split.backbone, split.head
    tokens = mx.zeros((1, 1), mx.int32)
    # MLX is lazy, so asking for shapes alone computes nothing.
    ours, theirs = (parts[1](parts[0](tokens)).shape[-1] for parts in (student, (teacher_backbone, teacher_head)))
    if ours != theirs:
        raise UserError(
            f"teacher {config.teacher}: expected as many logits as the model has, which are {ours:,}, got {theirs:,}; "
            "give a teacher of the model's family."
        )
    if compare:
        mx.eval(teacher.parameters())

    def loss(
        inputs: mx.array, targets: mx.array, weights: mx.array, beside: Mapping[str, mx.array] | None = None
    ) -> tuple[mx.array, ...]:
        hidden = backbone(inputs)
        beside = beside or {}
        known = beside.get("teacher")
        if known is None:
            # The sums that the model's routers collect are not for the teacher's.
            with side_outputs.collecting(False):
                known = mx.stop_gradient(teacher_backbone(inputs))
        beta = 1.0 if config.beta is None else config.beta
        sums = linear_divergence(
            head, hidden, (teacher_head, known), weights, beta=beta, temperature=config.temperature
        )
        # A batch of a run that samples answers has figures beside its arrays.
        return (*sums, beside["figures"]) if "figures" in beside else sums

    return loss
