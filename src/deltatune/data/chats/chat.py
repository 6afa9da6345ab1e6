"""Tokenises rendered conversations, and marks the tokens that count in the loss."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np

from ...errors import UserError
from ...upstream import hugging_face_tokenizer
from .rendering import ChatRow

# How many tokens a message quotes from the place where two texts differ.
_SHOWN_TOKENS = 6
_REMEDY = (
    'Or put "weight": 0 on this message to leave it out of the loss, or use --no-mask-prompt to train on every token.'
)


class ChatTokenizer:
    """Tokenises rows of conversations, many at once, which the library spreads over the cores.

    A turn counts from the end of its prompt. The tokens of its prompt must begin the row: where the first token of the
    answer merges with the prompt's last one, the model would never generate these tokens.
    """

    def __init__(self, tokenizer: Any):
        self._inner = hugging_face_tokenizer(tokenizer)
        self._added = {number: token.content for number, token in self._inner.added_tokens_decoder.items()}
        # Few texts stand between the last added token and an answer, such as the name of its role.
        # It holds the inner tokenizer and not this object, which would wait for the collection of cycles otherwise.
        self.short = lru_cache(4096)(lambda text, inner=self._inner: encoded(inner, [text])[0])

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        return encoded(self._inner, texts)

    def targets(self, row: ChatRow, tokens: list[int], source: str) -> tuple[np.ndarray, int]:
        """Return which tokens of a row count, bool [N], and how many turns are behind a prompt of `row.others`.

        A UserError says that there are no tokens, or that those of a turn do not begin or end where the turn does.
        """
        if not tokens:
            raise UserError(f"{source}: empty after the chat template; give the conversation messages with content.")
        targets = np.zeros(len(tokens), bool)
        if row.blocks:
            self._mark_blocks(row, targets)
            return targets, len(row.others)
        others = 0
        added = {number: self._added[number] for number in self._added.keys() & set(tokens)}
        place = partial(self._place, row.text, tokens, added)
        for starts, end in row.turns:
            at, start = next(((at, index) for at in starts if (index := place(at)) is not None), (0, None))
            others += at in row.others
            if start is None:
                raise UserError(f"{source}: {self._merged(row.text, tokens, starts[0])} {_REMEDY}")
            last = place(end)
            if last is None:
                raise UserError(
                    f"{source}: the end of an answer merges into one token with what follows it; use --chat-turns "
                    f"last. {_REMEDY}"
                )
            targets[start:last] = True
        return targets, others

    def _place(self, text: str, tokens: list[int], added: dict[int, str], end: int) -> int | None:
        """Return how many tokens text[:end] has, or None if they are not the first of the text's tokens.

        `added` are the added ones of the tokens, as they are written.
        """
        if end in (0, len(text)):
            return len(tokens) if end else 0
        # A text is cut at its added tokens first, so the tokens behind the last of them depend on nothing before it.
        cut, last = 0, 0
        for number, written in added.items():
            at = text.rfind(written, 0, end)
            if at >= 0 and at + len(written) > cut:
                cut = at + len(written)
                last = number
        if cut and tokens.count(last) == text.count(added[last]):
            first = 0
            for _ in range(text.count(added[last], 0, cut)):
                first = tokens.index(last, first) + 1
            after = self.short(text[cut:end])
            if tokens[first : first + len(after)] == after:
                return first + len(after)
        prefix = self.encode([text[:end]])[0]
        return len(prefix) if tokens[: len(prefix)] == prefix else None

    def _mark_blocks(self, row: ChatRow, targets: np.ndarray) -> None:
        """Mark the tokens that hold a character of the template's {% generation %} blocks, as transformers does."""
        encoding = self._inner(row.text, add_special_tokens=False, verbose=False)
        for (start,), end in row.turns:
            first, last = (encoding.char_to_token(at) for at in (start, max(end - 1, start)))
            if first is None:
                break
            targets[first : None if last is None else last + 1] = True

    def _merged(self, text: str, tokens: list[int], start: int) -> str:
        prompt = self.encode([text[:start]])[0]
        different = (index for index, pair in enumerate(zip(prompt, tokens, strict=False)) if pair[0] != pair[1])
        at = next(different, min(len(prompt), len(tokens)))
        before, after = (self._inner.decode(ids[max(at - 1, 0) : at + _SHOWN_TOKENS]) for ids in (prompt, tokens))
        return (
            f"the start of this answer merges into one token with the end of its prompt ({before!r} became {after!r}), "
            "so the answer is not generated from these prompt tokens; remove white space at the start of the answer."
        )


def encoded(tokenizer: Any, texts: list[str], *, specials: bool = False) -> list[list[int]]:
    """Return the tokens that transformers' tokenizer gives for each text, with special ones of its own or without."""
    if not texts:
        return []
    return tokenizer(
        texts, add_special_tokens=specials, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
