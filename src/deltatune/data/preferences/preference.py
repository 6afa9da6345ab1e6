"""Defines a preference, the example of a preference loss: two documents, completed and laid out in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...errors import UserError
from ...options.config import TrainConfig
from ...options.values import agreeing
from ..example import Example


@dataclass(frozen=True, slots=True, eq=False)
class Preference:
    """Two documents that belong together; the targets of each mark its answer.

    They are the chosen and the rejected answer, each behind their prompt. Where answers are judged one by one (KTO),
    they are the answer, `desirable` or not, and the answer of another row behind the same prompt; before that other
    answer is added, the answer alone. `reference`, float32 [2], holds the log-probability of each answer under the
    reference model, NaN until train/evaluation/reference.py fills it in.
    """

    documents: tuple[Example, ...]
    desirable: bool = True
    reference: np.ndarray = field(default_factory=lambda: np.full(2, np.nan, np.float32))

    @property
    def source(self) -> str:
        """The file and line, or data set and row, that messages name."""
        return self.documents[0].source

    @property
    def positions(self) -> int:
        """The positions that both documents need in a packed row."""
        return sum(document.positions for document in self.documents)

    @property
    def undecided(self) -> bool:
        """Whether the two documents are equal in their tokens and pictures, so that neither is preferred."""
        if len(self.documents) == 1:
            return False
        one, other = self.documents
        return np.array_equal(one.tokens, other.tokens) and _digests(one) == _digests(other)

    def with_documents(self, documents: Sequence[Example]) -> Preference:
        """Return the preference with other documents in the place of its own."""
        return replace(self, documents=tuple(documents))


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceBatch:
    """The P preferences of a batch, some of them blank: which documents belong together, and their properties.

    `documents`, int32 [B, T], is the number of the document within its row, D in padding; of those numbered row by row,
    2p and 2p + 1 are the documents of preference p. Of each, `numbers`, int32 [P], is its place in the data, -1 for a
    blank one; float32 [P] are `present`, 0 for a blank one, and `desirable`, 1 where the first document is a good
    answer. Float32 [P, 2] are the references, the tokens of each answer and the positions of each document.
    """

    documents: np.ndarray
    numbers: np.ndarray
    present: np.ndarray
    desirable: np.ndarray
    reference: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of a step, by name."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "numbers"}


# The most preferences in a packed row. A loss compares the number of each document with that of each position.
SLOTS = 32


def lay_out(
    rows: Sequence[Sequence[int]],
    preferences: Sequence[Preference],
    slots: int,
    width: int,
    *,
    packed: bool,
) -> tuple[list[list[Example]], PreferenceBatch]:
    """Lay the preferences of a batch out in rows: return the documents of each row, and the arrays that the loss needs.

    Each of `rows` holds the numbers of its preferences, none for a blank row, and has room for `slots`, which is 1
    without packing. A packed row holds all of its documents one after another in `width` positions; otherwise it
    becomes two rows of the batch, of one document each.
    """
    numbers = np.full((len(rows), slots), -1, np.int32)
    documents: list[list[Example]] = []
    for place, row in zip(numbers, rows, strict=True):
        place[: len(row)] = row
        held = [list(preferences[number].documents) for number in row]
        if packed:
            documents.append([document for pair in held for document in pair])
        else:
            documents += [[document] for document in held[0]] if held else [[], []]
    per_row = 2 * slots if packed else 1
    marks = np.full((len(documents), width), per_row, np.int32)
    for mark, held_here in zip(marks, documents, strict=True):
        ends = np.cumsum([document.positions for document in held_here], dtype=np.int64)
        for number, (document, end) in enumerate(zip(held_here, ends, strict=True)):
            mark[end - document.positions : end] = number
    flat = numbers.reshape(-1)
    present = (flat >= 0).astype(np.float32)
    desirable = np.zeros(flat.size, np.float32)
    reference = np.zeros((flat.size, 2), np.float32)
    tokens, lengths = np.ones((flat.size, 2), np.float32), np.ones((flat.size, 2), np.float32)
    for index, number in enumerate(flat.tolist()):
        if number >= 0:
            one = preferences[number]
            desirable[index] = one.desirable
            reference[index] = one.reference
            tokens[index] = [document.targets.sum() for document in one.documents]
            lengths[index] = [document.positions for document in one.documents]
    return documents, PreferenceBatch(marks, flat, present, desirable, reference, tokens, lengths)


def _digests(document: Example) -> tuple[bytes, ...]:
    return () if document.pictures is None else document.pictures.digests


# KTO would need an image of one row behind the prompt of another; ORPO predicts whole prompts, images included.
_WITHOUT_IMAGES = ("kto", "orpo")


def completed(preferences: Sequence[Preference], config: TrainConfig, notes: list[str]) -> list[Preference]:
    """Return preferences of two documents each; UserError where the loss does not take these documents.

    KTO judges answers one by one: every answer of a pair becomes a preference, first all chosen ones, as TRL orders
    them, and each gets the answer of the row before it as its second document. A note on pairs that are left out joins
    `notes`.
    """
    limit = config.max_seq_length
    pictured = next((one for one in preferences if one.documents[0].pictures is not None), None)
    if pictured is not None and config.loss in _WITHOUT_IMAGES:
        raise UserError(f"{pictured.source}: --loss {config.loss} does not take images; use dpo, simpo or cpo.")
    differing = [one for one in preferences if not one.undecided]
    if left_out := len(preferences) - len(differing):
        notes.append(
            f"{left_out:,} {agreeing(left_out, 'pairs were')} left out: within max_seq_length {limit:,}, chosen and "
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
