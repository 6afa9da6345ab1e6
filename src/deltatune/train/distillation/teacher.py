"""Loads the teacher of a run, once however often the run is set up, and compares its vocabulary with the model's."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import mlx.nn as nn

from ...errors import UserError
from ...models.load import Loaded, load_model, load_tokenizer, locate
from ...options.config import TrainConfig
from ...upstream import hugging_face_tokenizer

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
