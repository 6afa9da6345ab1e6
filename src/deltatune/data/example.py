"""Defines the examples that the trainer learns from, and the splits of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..options.conditions import Facts
from .vision.media import Pictures

# Begins the end of the source of an example that is a part of a conversation.
PART = " (messages 1 to "


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One tokenised document.

    Args:
        tokens: int32 [N], with N >= 2.
        targets: bool [N], whether the prediction of each token from the tokens before it counts in the loss. The first
            token is never predicted, so targets[0] is False.
        source: The file and line, or data set and row, that messages name.
        pictures: The images and videos of the example for a model with a vision tower, None for any other model.
    """

    tokens: np.ndarray
    targets: np.ndarray
    source: str
    pictures: Pictures | None = None

    @property
    def row(self) -> str:
        """The row of data, of which a conversation may make several examples."""
        return self.source.partition(PART)[0]

    @property
    def positions(self) -> int:
        """The length of the model's input, one less than the tokens: the last token is predicted but never read."""
        return len(self.tokens) - 1

    @property
    def prompt(self) -> Example:
        """The tokens before the last answer, which is the last run of targets; the first token of a plain text."""
        begins = np.flatnonzero(self.targets[1:] & ~self.targets[:-1])[-1] + 1
        return Example(self.tokens[:begins], np.zeros(begins, bool), self.source)

    def answered(self, answer: np.ndarray) -> Example:
        """Return this prompt with an answer, int32 [M], which alone counts in the loss."""
        tokens = np.concatenate([self.tokens, answer])
        pictures = None if self.pictures is None else self.pictures.before_text(len(answer))
        return Example(tokens, np.arange(len(tokens)) >= len(self.tokens), self.source, pictures)

    @property
    def beside(self) -> bytes:
        """The content of the example beside its tokens and pictures, which a prompt for rewards has."""
        return b""

    @property
    def documents(self) -> tuple[Example, ...]:
        """The documents that a batch holds for this example: itself alone (a Preference has two)."""
        return (self,)

    def with_documents(self, documents: Sequence[Example]) -> Example:
        """Return the one document in `documents`."""
        (document,) = documents
        return document


@dataclass(frozen=True)
class Splits:
    """The examples of a run. A split is empty if the run does not need it, or if it does not exist.

    Args:
        rule: One sentence that says which tokens count in the loss.
        notes: Sentences to print at the start, such as how many examples were truncated or skipped.
        facts: The properties of the rows.
        template_options: Variables of the chat template with which a model that is trained on these examples is asked.
    """

    train: Sequence[Example] = ()
    valid: Sequence[Example] = ()
    test: Sequence[Example] = ()
    rule: str = ""
    notes: list[str] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    template_options: dict[str, Any] | None = None

    @property
    def plain_text(self) -> bool:
        """Whether every row was plain text, without a prompt."""
        return not self.facts.turns

    def documents(self) -> Iterator[Example]:
        """Yield every document of the splits."""
        for part in (self.train, self.valid, self.test):
            for example in part:
                yield from example.documents
