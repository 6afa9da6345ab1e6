"""Finds the token that ends generation behind each assistant turn, also where a template leaves it to the next turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from .template_probes import Write, behind_an_answer, behind_the_last_answer, first_of

# White space that templates put behind an end token is shorter than this.
_LOOK_BACK = 200


class TurnEnds:
    """The ends of turns in the texts of one template.

    GLM-4.5 ends a turn by the marker of the next role, which is a token at which generation stops. So it is part of the
    turn, and behind the last turn it is added, as in TRL's template for that model. Where a template marks no end at
    all, the tokenizer's end token is added behind the last turn.

    Args:
        write: Renders messages with the template; it may raise the errors of templates.
        ends: The tokens at which generation stops, as they are written.
        specials: The special tokens, as they are written.
        added: The token that is added where the template marks no end; "" if there is none.
    """

    def __init__(self, write: Write, ends: Sequence[str], specials: Sequence[str], added: str):
        self._write, self._added = write, added
        self._ends, self._specials = tuple(filter(None, ends)), tuple(filter(None, specials))
        self._missing = cache(self._found_missing)

    def closed(self, text: str, message: dict[str, Any]) -> str:
        """Return a conversation's text with the token that ends its last message; a prompt stays as it is."""
        if message["role"] != "assistant" or self._ends_with(self._ends, text, len(text)):
            return text
        missing = self._missing(bool(message.get("tool_calls")))
        if missing is None:
            missing = "" if self._ends_with(self._specials, text, len(text)) else self._added
        return text + missing

    def within(self, text: str, end: int) -> int:
        """Return where a turn ends that the template ends at `end`: behind the end token there, if it has no other."""
        if self._ends_with(self._ends, text, end):
            return end
        return end + len(next((token for token in self._ends if text.startswith(token, end)), ""))

    def _found_missing(self, tools: bool) -> str | None:
        """Return the end token missing behind a last answer, "" if none is; None if the template does not show it."""
        tail = behind_the_last_answer(self._write, tools=tools)
        follows = first_of(self._ends, behind_an_answer(self._write, tools=tools) or "")
        if tail is None:
            return follows
        if first_of(self._ends, tail):
            return ""
        return follows or ("" if first_of(self._specials, tail) else self._added)

    def _ends_with(self, tokens: tuple[str, ...], text: str, end: int) -> bool:
        return text[max(end - _LOOK_BACK, 0) : end].rstrip().endswith(tokens)
