"""Turns a row of TRL's preference formats into documents: pairs of answers, or single answers with a label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import UserError
from ..example import Example
from ..prompts import text_tokens
from ..rows.row_formats import behind_prompt, messages_in_text, present_fields
from ..rows.unread_columns import text_of
from ..text import TextEncoder
from .preference import Preference

PROMPT = "prompt"
CHOSEN = "chosen"
REJECTED = "rejected"
COMPLETION = "completion"
LABEL = "label"
_LABELS = {"true": True, "false": False, "1": True, "0": False}
_TEXTS = (PROMPT, CHOSEN, REJECTED, COMPLETION)
# Columns that a row may hold besides the answers: tools for the chat template, and images or videos.
_BESIDE = ("tools", "functions", "chat_template_kwargs", "images", "image", "videos", "video")
# Keys of rows with answers to be imitated.
_IMITATED = {"messages", "conversations", "output", "text", COMPLETION}
_PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...} (the prompt may be left out)'
_LABELLED = '{"prompt": ..., "completion": ..., "label": true or false}'


class PreferenceEncoder:
    """Turns rows into preferences, and collects their formats (`kinds`), with the tokens of trl.data_utils and
    DPOTrainer.

    A row holds strings, which are taken as plain text, or lists of messages, which go through the chat template. Only
    answers count: the text behind the prompt, and of messages the assistant's. Without a "prompt", both answers begin
    with it, and their longest common beginning is taken for it: of messages, or of the tokens of a text. With `labels`
    (KTO) answers with a label are expected, and a pair stands for two of them.
    """

    def __init__(self, conversations: TextEncoder, tokenizer: Any, *, labels: bool):
        self._conversations = conversations
        self._tokenizer = tokenizer
        self._labels = labels
        self.kinds: Counter[str] = Counter()

    def stream(self, rows: Iterable[tuple[str, Any]], _count: int) -> Iterator[list[Preference]]:
        """Yield the preference of each row at full length; UserError, naming the row, if it cannot be learnt from."""
        read = [self._read(row, source) for source, row in rows]
        conversations = [
            (one.source, answer) for one in read for answer in one.answers if not isinstance(answer, Example)
        ]
        encoded = self._conversations.stream(iter(conversations), len(conversations))
        for one in read:
            documents = [
                answer if isinstance(answer, Example) else _only(next(encoded), one.source) for answer in one.answers
            ]
            preference = Preference(tuple(documents), one.desirable)
            if preference.undecided:
                raise UserError(
                    f"{one.source}: chosen and rejected are equal, so neither is preferred; remove this row."
                )
            yield [preference]

    def _read(self, row: Any, source: str) -> _Read:
        if not isinstance(row, Mapping):
            raise UserError(f"{source}: expected an object with {self._expected()}, got {type(row).__name__}.")
        row = {name: value for name, value in _with_messages(row).items() if value not in (None, [])}
        if LABEL in row and not {CHOSEN, REJECTED} & row.keys():
            return self._labelled(row, source)
        missing = [side for side in (CHOSEN, REJECTED) if side not in row]
        if missing:
            raise UserError(self._incomplete(row, missing, source))
        kind = _same_kind(row, [name for name in (PROMPT, CHOSEN, REJECTED) if name in row], source)
        self.kinds[CHOSEN] += 1
        return _Read(self._texts(row, source) if kind is str else self._messages(row, source), source)

    def _expected(self) -> str:
        return f"{_LABELLED}, or {_PAIR}" if self._labels else _PAIR

    def _incomplete(self, row: Mapping[str, Any], missing: list[str], source: str) -> str:
        if len(missing) == 1:
            return f"{source}: {missing[0]!r} is missing or null, so this is no pair; expected {self._expected()}."
        got = ", ".join(map(repr, row)) or "no key"
        hint = " To imitate answers, leave --loss out." if _IMITATED & set(row) else ""
        return f"{source}: no known format: expected {self._expected()}, got {got}.{hint}"

    def _labelled(self, row: Mapping[str, Any], source: str) -> _Read:
        if not self._labels:
            raise UserError(
                f"{source}: an answer with a label is for --loss kto; this loss needs pairs: expected {_PAIR}."
            )
        label = row[LABEL]
        # A cell of a CSV file is text.
        if isinstance(label, str):
            label = _LABELS.get(label.strip().lower(), label)
        if not isinstance(label, bool) and label not in (0, 1):
            raise UserError(f"{source}: {LABEL!r}: expected true or false, got {label!r}.")
        if PROMPT not in row or COMPLETION not in row:
            raise UserError(f"{source}: a prompt or a completion is missing; expected {_LABELLED}.")
        if _same_kind(row, [PROMPT, COMPLETION], source) is str:
            answer: _Answer = self._text(row[PROMPT], row[COMPLETION], COMPLETION, source)
        else:
            answer = _conversation(row, row[PROMPT], row[COMPLETION], COMPLETION, source)
        self.kinds[LABEL] += 1
        return _Read([answer], source, bool(label))

    def _texts(self, row: Mapping[str, Any], source: str) -> Sequence[_Answer]:
        for name in _BESIDE:
            if row.get(name):
                raise UserError(f"{source}: {name!r} belongs to messages; this row holds plain text.")
        if PROMPT in row:
            return [self._text(row[PROMPT], row[side], side, source) for side in (CHOSEN, REJECTED)]
        tokens = [self._with_end(row[side], side, source) for side in (CHOSEN, REJECTED)]
        shared = _common(*tokens)
        if shared == 0:
            raise UserError(f"{source}: chosen and rejected begin differently and there is no prompt; add the prompt.")
        return [_document(one, min(shared, len(one) - 1), source) for one in tokens]

    def _text(self, prompt: str, answer: str, side: str, source: str) -> Example:
        before = text_tokens(self._tokenizer, prompt) if prompt else []
        if not before:
            raise UserError(f"{source}: the prompt is empty; an answer is judged behind its prompt.")
        tokens = self._with_end(prompt + answer, side, source, answer)
        if tokens[: len(before)] != before:
            at = _common(before, tokens)
            raise UserError(
                f"{source}: the prompt's tokens are no prefix of those of prompt and {side}: its end "
                f"{self._tokenizer.decode(before[at:])!r} merges with what follows; end the prompt where a token ends, "
                "for example by moving a space at its end to the start of both answers."
            )
        return _document(tokens, len(before), source)

    def _with_end(self, text: str, side: str, source: str, answer: str | None = None) -> list[int]:
        if not (text if answer is None else answer).strip():
            raise UserError(f"{source}: {side!r} is empty; remove this row.")
        tokens = text_tokens(self._tokenizer, text)
        end = self._tokenizer.eos_token_id
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]

    def _messages(self, row: Mapping[str, Any], source: str) -> Sequence[_Answer]:
        chosen = row[CHOSEN]
        rejected = row[REJECTED]
        prompt = row.get(PROMPT)
        if prompt is None or isinstance(prompt, str):
            shared = _common(chosen, rejected)
            texts = [text_of(message.get("content")) for message in chosen[:shared] if isinstance(message, Mapping)]
            if prompt and prompt not in texts:
                raise UserError(
                    f"{source}: the prompt is a text and chosen a list of messages that do not begin with it; give the "
                    "prompt as messages, or leave it out."
                )
            if chosen == rejected or shared == 0:
                what = "are equal" if chosen == rejected else "begin with different messages and there is no prompt"
                raise UserError(f"{source}: chosen and rejected {what}; remove this row or correct it.")
            prompt = chosen[:shared]
            chosen = chosen[shared:]
            rejected = rejected[shared:]
        sides = {CHOSEN: chosen, REJECTED: rejected}
        return [_conversation(row, prompt, answer, side, source) for side, answer in sides.items()]


def messages_of(row: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the messages of a row in any of the formats of preferences, unchecked."""
    row = _with_messages(row)
    for name in _TEXTS:
        if isinstance(row.get(name), list):
            yield from row[name]


def _with_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with messages in the place of texts that hold them as JSON, and without their empty fields."""
    texts = {name: messages_in_text(row[name]) for name in _TEXTS if name in row}
    lists = {name: value for name, value in texts.items() if isinstance(value, list)}
    return {**row, **texts, **{name: [*map(_without_empty, messages)] for name, messages in lists.items()}}


def _without_empty(message: Any) -> Any:
    return present_fields(message) | {"content": message.get("content")} if isinstance(message, Mapping) else message


# An answer that is tokenised already, or the row of a conversation.
_Answer = Example | dict[str, Any]


@dataclass(frozen=True)
class _Read:
    """The answers of a row, where it came from, and whether the first answer is a good one."""

    answers: Sequence[_Answer]
    source: str
    desirable: bool = True


def _conversation(
    row: Mapping[str, Any], prompt: list[Any], answer: list[Any], side: str, source: str
) -> dict[str, Any]:
    """Return the row of a conversation, of which the assistant's messages behind the prompt count."""
    beside = {name: row[name] for name in _BESIDE if name in row}
    return {"messages": behind_prompt(prompt, answer, side, source), **beside}


def _only(examples: list[Example], source: str) -> Example:
    if len(examples) > 1:
        raise UserError(
            f"{source}: the chat template rewrites an earlier turn of this answer once the next follows, so it has no "
            "log-probability of its own; end the answer at its first turn."
        )
    return replace(examples[0], source=source)


def _same_kind(row: Mapping[str, Any], names: Sequence[str], source: str) -> type:
    """Return whether these values are strings or lists of messages; UserError where they are neither or differ."""
    kinds = {}
    for name in names:
        value = row[name]
        if not isinstance(value, str | list):
            kind = type(value).__name__
            raise UserError(f"{source}: {name!r}: expected a string or a list of messages, got {kind}.")
        kinds[name] = str if isinstance(value, str) else list
    answers = {name: kind for name, kind in kinds.items() if name != PROMPT}
    if len(set(answers.values())) > 1 or (kinds.get(PROMPT) is list and str in answers.values()):
        listed = ", ".join(f"{name} {'a text' if kind is str else 'messages'}" for name, kind in kinds.items())
        raise UserError(f"{source}: {listed}: expected all of them as texts, or all as lists of messages.")
    if kinds.get(PROMPT) is str and COMPLETION in kinds and kinds[COMPLETION] is list:
        raise UserError(f"{source}: the prompt is a text and the completion messages; give both as one or the other.")
    return next(iter(answers.values()))


def _document(tokens: list[int], prompt: int, source: str) -> Example:
    targets = np.arange(len(tokens)) >= prompt
    targets[:1] = False
    return Example(np.array(tokens, np.int32), targets, source)


def _common(left: Sequence[Any], right: Sequence[Any]) -> int:
    length = min(len(left), len(right))
    return next((index for index in range(length) if left[index] != right[index]), length)
