"""What the trainer learns from: token ids, which of them count, and where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .vision.media import Pictures


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One document.

    tokens: int32 [N], N >= 2. targets: bool [N]; targets[i] says that token i counts as a prediction (made from the
    tokens before it); targets[0] is never true. source: file and line, or data set and row, for messages. pictures: the
    images of an example for a model with a vision tower, None for any other model.
    """

    tokens: np.ndarray
    targets: np.ndarray
    source: str
    pictures: Pictures | None = None

    @property
    def positions(self) -> int:
        """Places in a model's input: one fewer than tokens, since the last token is predicted and never read."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Splits:
    """The examples of a run. A split that was not asked for, or does not exist, is empty.

    rule: one sentence that says which tokens count in the loss. notes: sentences to be said at the start (how many
    examples were truncated or skipped, a missing validation set).
    """

    train: Sequence[Example] = ()
    valid: Sequence[Example] = ()
    test: Sequence[Example] = ()
    rule: str = ""
    notes: list[str] = field(default_factory=list)
