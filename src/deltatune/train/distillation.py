"""Distillation: a model learns the distributions of a teacher, another checkpoint with the same vocabulary.

The teacher is loaded once, however often a run is set up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..models.head import split_head
from ..models.load import Loaded, load_model, load_tokenizer, locate
from ..ops.divergence import linear_divergence
from ..ops.tracing import side_outputs
from ..options.config import TrainConfig
from ..upstream import hugging_face_tokenizer
from .batch_loss import LossFunction

# By folder, as long as somebody holds them: a plan, the training and the digest of a run share one.
_teachers: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()


def teacher_of(config: TrainConfig) -> nn.Module:
    """Return the teacher of a run, frozen; weights stay on the disk until they are used.

    A UserError says why it cannot load.
    """
    assert config.teacher is not None
    key = str(config.teacher)
    teacher = _teachers.get(key)
    if teacher is None:
        teacher, _ = load_model(locate(config.teacher), trust_remote_code=config.trust_remote_code, lazy=True)
        teacher.freeze()
        _teachers[key] = teacher
    return teacher


def checked_teacher(config: TrainConfig, student: Loaded) -> nn.Module:
    """Return the teacher of a run after a comparison of all tokens with those of the student.

    A UserError says where the vocabularies differ, or that the data have pictures.
    """
    if student.processor is not None:
        raise UserError("loss: distill learns from text, and the data have images; leave those rows out.")
    teacher = teacher_of(config)
    path = locate(config.teacher)
    tokenizer = load_tokenizer(path, {}, trust_remote_code=config.trust_remote_code)
    theirs = _tokens(tokenizer)
    ours = _tokens(student.tokenizer)
    differing = min(
        (token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token)), default=None
    )
    if differing is not None:
        raise UserError(
            f"teacher {config.teacher}: expected the vocabulary of the model, and token {differing} is "
            f"{ours.get(differing)!r} in the model and {theirs.get(differing)!r} in the teacher; give a teacher of the "
            "model's family."
        )
    return teacher


def _tokens(tokenizer: Any) -> dict[int, str]:
    """Return the tokens of a vocabulary by id."""
    return {token: text for text, token in hugging_face_tokenizer(tokenizer).get_vocab().items()}


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
