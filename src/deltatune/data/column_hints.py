"""Says what a row's columns may be for, where it has none of the known formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What the columns of other data sets are called, by the name that ours has in their place.
_MEANT = {
    "prompt": ("question", "query", "input", "instruction", "problem", "request", "user", "source"),
    "completion": ("answer", "response", "output", "reply", "solution", "assistant", "target", "summary"),
    "chat": ("messages", "chats", "dialogue", "dialog", "conversation", "conversations", "history", "turns"),
    "text": ("content", "document", "body", "passage"),
}


def column_hint(row: Mapping[str, Any]) -> str:
    """Return a sentence on how to read a row with these columns, or an empty string if nothing is known about them."""
    names = [str(key) for key in row]
    flags: dict[str, str] = {}
    for kind, words in _MEANT.items():
        matching = [name for name in names if name.lower() in (kind, *words)]
        # A column of our own name needs no flag.
        if matching and kind not in names:
            flags[kind] = f"--{kind}-column {_quoted(matching[0])}"
        elif matching:
            flags[kind] = ""
    pair = [flags[kind] for kind in ("prompt", "completion") if kind in flags]
    chosen = pair if len(pair) == 2 else [flags[kind] for kind in ("chat", "text") if kind in flags][:1]
    given = " ".join(filter(None, chosen))
    return f"To read these columns, give {given}." if given else ""


def _quoted(name: str) -> str:
    return f'"{name}"' if " " in name else name
