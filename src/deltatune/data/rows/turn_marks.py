"""Reads the marks with which data of several trainers leave a turn of a conversation out of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UserError

WEIGHT = "weight"
# OpenAI and Mistral; LLaMA-Factory; axolotl, twice; ms-swift and xtuner. A false or 0 leaves the turn out.
_LEARNT = (WEIGHT, "loss_weight", "train", "training", "loss")
# torchtune: a true leaves the turn out.
_MASKED = "masked"
# axolotl's marks of parts of a turn.
_PARTS = ("train_detail", "training_detail")
MARKS = (*_LEARNT, _MASKED, *_PARTS)


def counts(message: Mapping[str, Any], number: int, source: str) -> bool:
    """Return whether a message of the assistant, `number` of its conversation, counts in the loss: no mark denies it.

    Raises:
        UserError: A mark has a value that says neither, or marks parts of a turn.
    """
    marks = {name: message[name] for name in MARKS if message.get(name) is not None}
    for name, value in marks.items():
        where = f"{source}: message {number}"
        if name in _PARTS:
            raise UserError(
                f"{where}: {name!r} marks parts of a turn, which are not told apart; mark whole messages "
                f'with "{WEIGHT}": 0.'
            )
        if value not in (0, 1):
            expected = "0 or 1" if "weight" in name else "true or false"
            raise UserError(f'{where}: expected "{name}" {expected}, got {value!r}.')
    return all(bool(value) != (name == _MASKED) for name, value in marks.items())


def unmarked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of the assistant that does not count, whatever its own marks say."""
    return {name: value for name, value in message.items() if name not in MARKS} | {WEIGHT: 0}
