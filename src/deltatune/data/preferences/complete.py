"""Completes the preferences of a data set: drops pairs that truncation made equal, and adds KTO's other answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import UserError
from ...options.config import TrainConfig
from ..example import Example
from .preference import Preference

# KTO would need an image of one row behind the prompt of another; ORPO predicts whole prompts, images included.
_WITHOUT_IMAGES = ("kto", "orpo")


def completed(preferences: Sequence[Preference], config: TrainConfig, notes: list[str]) -> list[Preference]:
    """Return preferences of two documents each.

    KTO judges answers one by one: every answer of a pair becomes a preference, first all chosen ones, as TRL orders
    them, and each gets the answer of the row before it as its second document.

    Args:
        preferences: The preferences as read, with one or two documents each.
        config: The options of the run.
        notes: Sentences for the user, to which this function adds.

    Raises:
        UserError: The loss does not take these documents.
    """
    limit = config.max_seq_length
    pictured = next((one for one in preferences if one.documents[0].pictures is not None), None)
    if pictured is not None and config.loss in _WITHOUT_IMAGES:
        raise UserError(f"{pictured.source}: --loss {config.loss} does not take images; use dpo, simpo or cpo.")
    differing = [one for one in preferences if not one.undecided]
    if len(differing) < len(preferences):
        notes.append(
            f"{len(preferences) - len(differing):,} pairs were left out: within max_seq_length {limit:,}, chosen and "
            "rejected are equal."
        )
    if config.loss != "kto":
        return differing
    single = [one for one in differing if len(one.documents) == 1]
    pairs = [one for one in differing if len(one.documents) == 2]
    for index in (0, 1):
        single += [Preference((one.documents[index],), desirable=index == 0) for one in pairs]
    if len(single) == 1:
        raise UserError(
            f"{single[0].source}: the only answer; KTO compares each with the answer to another prompt, so give two "
            "rows or more."
        )
    answers = [one.documents[0] for one in single]
    before = [answers[-1], *answers[:-1]] if answers else []
    return [
        one.with_documents((document, _behind_prompt(document, other, limit)))
        for one, document, other in zip(single, answers, before, strict=True)
    ]


def _behind_prompt(first: Example, second: Example, limit: int) -> Example:
    """Return the document of the first one's prompt and the second one's answer."""
    prompt, start = int(np.argmax(first.targets)), int(np.argmax(second.targets))
    tokens = np.concatenate([first.tokens[:prompt], second.tokens[start:]])[:limit]
    targets = np.concatenate([np.zeros(prompt, bool), second.targets[start:]])[:limit]
    return Example(tokens, targets, f"{first.source} with the answer of {second.source}")
