"""Turns a row of data (a text, a prompt and its completion, or messages) into an example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import nearest
from ..errors import UserError
from .chat import ASSISTANT, tokenize_chat
from .example import Example

TEXT, COMPLETION, CHAT = "text", "completion", "chat"
TOOLS = "tools"


@dataclass(frozen=True)
class Features:
    """The keys under which a row holds its parts. The defaults are those of mlx_lm.lora."""

    prompt: str = "prompt"
    completion: str = "completion"
    chat: str = "messages"
    text: str = "text"


class TextEncoder:
    """Turns rows into examples with one tokenizer and one loss rule, and collects the formats of the rows (`kinds`).

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        features: the keys of a row.
        mask_prompt: False counts every token in the loss. None and True leave prompts out; True also refuses rows of
            plain text, which have no prompt, while None counts all of their tokens.

    Source:
        mlx_lm.tuner.datasets, which gives the same tokens for the same row.
    """

    def __init__(self, tokenizer: Any, features: Features, mask_prompt: bool | None):
        self._tokenizer, self._features, self._mask_prompt = tokenizer, features, mask_prompt
        self.kinds: set[str] = set()

    def __call__(self, row: Any, source: str) -> Example:
        """Return the row's example at full length; UserError, naming `source`, if it cannot be trained on."""
        messages = self.conversation(row, source)
        if messages is not None:
            return self.encode_chat(row, messages, source)
        tokens, targets = self._text(row, source)
        return self._example(tokens, targets, TEXT, source)

    def conversation(self, row: Any, source: str) -> list[dict[str, Any]] | None:
        """Return the row's messages, or None for plain text. A prompt and its completion are two messages."""
        if not isinstance(row, Mapping):
            raise UserError(f"{source}: expected an object with {self._expected()}, got {type(row).__name__}.")
        kind = self._kind(row, source)
        self.kinds.add(kind)
        if kind == TEXT:
            return None
        return self._messages(row, source) if kind == CHAT else self._completion(row, source)

    def encode_chat(self, row: Mapping[str, Any], messages: list[dict[str, Any]], source: str) -> Example:
        """Return the example of these messages, with the row's tools."""
        tools = _typed(row, TOOLS, list, source) if row.get(TOOLS) is not None else None
        completions_only = self._mask_prompt is not False
        tokens, targets = tokenize_chat(
            self._tokenizer, messages, tools, completions_only=completions_only, source=source
        )
        return self._example(tokens, targets, self._kind(row, source), source)

    def _example(self, tokens: list[int], targets: np.ndarray, kind: str, source: str) -> Example:
        """Build the example; UserError where none of its tokens counts in the loss."""
        targets[:1] = False
        if not targets.any():
            what = "no assistant turn counts" if kind == CHAT else "there is no token to predict"
            raise UserError(
                f"{source}: nothing to learn from: {what}, so every token is masked; remove this row or correct it."
            )
        return Example(np.array(tokens, np.int32), targets, source)

    def _formats(self) -> dict[str, list[str]]:
        """Return the keys of each format, or of those formats alone in which the user has named a key."""
        names = self._features
        formats = {COMPLETION: [names.prompt, names.completion], CHAT: [names.chat], TEXT: [names.text]}
        named = set(vars(names).values()) - set(vars(Features()).values())
        # Without this, a row could be read under the default key of a format that the user did not ask for.
        return {kind: keys for kind, keys in formats.items() if not named or named.intersection(keys)}

    def _expected(self) -> str:
        """Return the words in which messages name the possible formats."""
        return ", or ".join(" and ".join(f'"{key}"' for key in keys) for keys in self._formats().values())

    def _kind(self, row: Mapping[str, Any], source: str) -> str:
        """Return the format of a row: the first whose keys it all has."""
        formats = self._formats()
        present = {key for key, value in row.items() if value is not None}
        for kind, keys in formats.items():
            if present.issuperset(keys):
                return kind
        known = [key for keys in formats.values() for key in keys]
        null = [key for key in known if key in row and key not in present]
        if null:
            raise UserError(f"{source}: {null[0]!r} is null; expected {self._expected()}.")
        missing = [key for key in known if key not in row]
        got = ", ".join(repr(key) + ("" if key in known else nearest(str(key), missing)) for key in row)
        raise UserError(f"{source}: no known format: expected {self._expected()}, got {got or 'no key'}.")

    def _text(self, row: Mapping[str, Any], source: str) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a plain text, all of which count, with an end token."""
        if self._mask_prompt:
            raise UserError(
                f"{source}: --mask-prompt leaves prompts out of the loss, and a text line has none; "
                "remove the flag, or use prompt/completion or chat lines."
            )
        text = _typed(row, self._features.text, str, source)
        tokens = self._tokenizer.encode(text) if text.strip() else []
        if not tokens:
            raise UserError(f"{source}: empty text; remove this row.")
        end = self._tokenizer.eos_token_id
        if end is not None and tokens[-1] != end:
            tokens = [*tokens, end]
        return tokens, np.ones(len(tokens), bool)

    def _completion(self, row: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
        """Return a prompt and its completion as a conversation."""
        prompt = _typed(row, self._features.prompt, str, source)
        completion = _typed(row, self._features.completion, str, source)
        if not completion.strip():
            raise UserError(
                f"{source}: empty {self._features.completion!r}: there is nothing to learn from; remove this row."
            )
        return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}]

    def _messages(self, row: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
        """Return the messages of a row after checking that each has a role and content."""
        messages = _typed(row, self._features.chat, list, source)
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise UserError(
                    f'{source}: message {number}: expected {{"role": ..., "content": ...}}, got {_short(message)}.'
                )
            content = message.get("content")
            if content is not None and not isinstance(content, str | list):
                raise UserError(f'{source}: message {number}: expected a string as "content", got {_short(content)}.')
        if not any(message.get("content") or message.get("tool_calls") for message in messages):
            raise UserError(f"{source}: empty conversation: no message has content; remove this row.")
        return messages


def _typed(row: Mapping[str, Any], key: str, kind: type, source: str) -> Any:
    """Return the value of a key after checking that it is a list or a string, as `kind` says."""
    value = row[key]
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "a string"
        raise UserError(f"{source}: {key!r}: expected {expected}, got {_short(value)}.")
    return value


def _short(value: Any) -> str:
    """Return the type and the beginning of a value, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
