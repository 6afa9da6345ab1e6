"""One row of data (text, prompt and completion, or messages) to one Example."""

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
    """The keys under which a row holds its parts; the defaults are mlx_lm.lora's."""

    prompt: str = "prompt"
    completion: str = "completion"
    chat: str = "messages"
    text: str = "text"


class TextEncoder:
    """Turns rows into examples with one tokenizer and one loss rule.

    mask_prompt: None or True leave prompts out of the loss (None allows text rows, where every token counts); False
    counts every token. The tokens are those of mlx_lm.tuner.datasets for the same row.
    """

    def __init__(self, tokenizer: Any, features: Features, mask_prompt: bool | None):
        self._tokenizer, self._features, self._mask_prompt = tokenizer, features, mask_prompt
        self.kinds: set[str] = set()

    def __call__(self, row: Any, source: str) -> Example:
        """The row's example, at full length. UserError, with `source`, where the row cannot be trained on."""
        messages = self.conversation(row, source)
        if messages is not None:
            return self.encode_chat(row, messages, source)
        tokens, targets = self._text(row, source)
        return self._example(tokens, targets, TEXT, source)

    def conversation(self, row: Any, source: str) -> list[dict[str, Any]] | None:
        """The row's messages, a prompt and its completion being two; None for a row of plain text."""
        if not isinstance(row, Mapping):
            raise UserError(f"{source}: expected an object with {self._expected()}, got {type(row).__name__}.")
        kind = self._kind(row, source)
        self.kinds.add(kind)
        if kind == TEXT:
            return None
        return self._messages(row, source) if kind == CHAT else self._completion(row, source)

    def encode_chat(self, row: Mapping[str, Any], messages: list[dict[str, Any]], source: str) -> Example:
        """The example of these messages, with the row's tools."""
        tools = _typed(row, TOOLS, list, source) if row.get(TOOLS) is not None else None
        completions_only = self._mask_prompt is not False
        tokens, targets = tokenize_chat(
            self._tokenizer, messages, tools, completions_only=completions_only, source=source
        )
        return self._example(tokens, targets, self._kind(row, source), source)

    def _example(self, tokens: list[int], targets: np.ndarray, kind: str, source: str) -> Example:
        targets[:1] = False
        if not targets.any():
            what = "no assistant turn counts" if kind == CHAT else "there is no token to predict"
            raise UserError(f"{source}: nothing to learn from: {what}, so every token is masked; remove or mend it.")
        return Example(np.array(tokens, np.int32), targets, source)

    def _formats(self) -> dict[str, list[str]]:
        """The keys of each format; only those with a key that the user named, where one is named."""
        names = self._features
        formats = {COMPLETION: [names.prompt, names.completion], CHAT: [names.chat], TEXT: [names.text]}
        named = set(vars(names).values()) - set(vars(Features()).values())
        # A named key must not lose silently to another format whose usual key is there too.
        return {kind: keys for kind, keys in formats.items() if not named or named.intersection(keys)}

    def _expected(self) -> str:
        return ", or ".join(" and ".join(f'"{key}"' for key in keys) for keys in self._formats().values())

    def _kind(self, row: Mapping[str, Any], source: str) -> str:
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
        if self._mask_prompt:
            raise UserError(
                f"{source}: --mask-prompt leaves prompts out of the loss, and a text line has none; "
                "drop it, or use prompt/completion or chat lines."
            )
        text = _typed(row, self._features.text, str, source)
        tokens = self._tokenizer.encode(text) if text.strip() else []
        if not tokens:
            raise UserError(f"{source}: empty text; remove it.")
        end = self._tokenizer.eos_token_id
        if end is not None and tokens[-1] != end:
            tokens = [*tokens, end]
        return tokens, np.ones(len(tokens), bool)

    def _completion(self, row: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
        prompt = _typed(row, self._features.prompt, str, source)
        completion = _typed(row, self._features.completion, str, source)
        if not completion.strip():
            raise UserError(f"{source}: empty {self._features.completion!r}: nothing to learn from; remove it.")
        return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}]

    def _messages(self, row: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
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
            raise UserError(f"{source}: empty conversation: no message has content; remove it.")
        return messages


def _typed(row: Mapping[str, Any], key: str, kind: type, source: str) -> Any:
    value = row[key]
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "a string"
        raise UserError(f"{source}: {key!r}: expected {expected}, got {_short(value)}.")
    return value


def _short(value: Any) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
