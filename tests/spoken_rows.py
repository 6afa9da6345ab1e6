"""Chat rows of many shapes, each text of which is a word of its own, and the kinds of those that are in no token."""

import json
import random
from collections import Counter
from collections.abc import Iterable
from itertools import count
from typing import Any

from deltatune.data.rows.row_formats import Features
from deltatune.data.text import TextEncoder
from deltatune.errors import UserError

# Parts, each with its kind; and the kind of all of them together, and the message that holds them.
Groups = list[tuple[str, "int | None", list[tuple[str, str]]]]


def spoken_row(chance: random.Random) -> tuple[dict[str, Any], Groups]:
    """Return a row of some shape, and its parts."""
    return _Row(chance).made()


def checked_kinds(tokenizer: Any, rows: int, seed: int) -> tuple[set[str], int]:
    """Check that each part of rows is in the tokens or counted; return the counted kinds, and how many were read."""
    chance, kinds, read = random.Random(seed), Counter[str](), 0
    for number in range(rows):
        row, parts = spoken_row(chance)
        encode = TextEncoder(tokenizer, Features(), None)
        try:
            examples = encode(row, f"row {number}")
        except UserError:
            continue
        text = "\n".join(tokenizer.decode(example.tokens) for example in examples)
        assert encode.unwritten == in_no_token(parts, text.lower()), row
        kinds += encode.unwritten
        read += 1
    return set(kinds), read


def in_no_token(groups: Groups, text: str) -> Counter[str]:
    """Return how many messages, or rows for tools, have parts of each kind that do not stand in a text."""
    found = {(kind, place) for whole, place, parts in groups for kind in _missing(whole, parts, text)}
    return Counter(kind for kind, _ in found)


def _missing(whole: str, parts: list[tuple[str, str]], text: str) -> Iterable[str]:
    missing = [kind for kind, word in parts if word not in text]
    return [whole] if parts and len(missing) == len(parts) else missing


class _Row:
    """Makes one row."""

    def __init__(self, chance: random.Random):
        self._chance = chance
        self._numbers = count(48_211)
        self._messages: list[dict[str, Any]] = []
        self._groups: Groups = []

    def made(self) -> tuple[dict[str, Any], Groups]:
        """Return the row and its parts."""
        choice = self._chance.choice
        self._say(choice([None, "system", "developer"]))
        for turn in range(choice([1, 2, 3])):
            self._say(choice([None, None, "system", "developer"]) if turn else None)
            self._say("user", named=choice([False, False, True]))
            if choice([False, True]):
                self._answer(calls=choice([1, 1, 2]))
                self._results()
            self._answer(calls=0)
        row: dict[str, Any] = {"messages": self._messages}
        if choice([False, True]):
            row["tools"] = [self._tool() for _ in range(choice([1, 2]))]
        return row, self._groups

    def _word(self) -> str:
        return f"w{next(self._numbers)}"

    def _say(self, role: str | None, named: bool = False) -> None:
        if role is None:
            return
        message = {"role": role, "content": self._word()}
        parts = [(f"{role} messages", message["content"])]
        if named:
            message["name"] = self._word()
            parts.append(("names", message["name"]))
        self._groups.append((f"{role} messages", len(self._messages), parts))
        self._messages.append(message)

    def _answer(self, calls: int) -> None:
        choice, place = self._chance.choice, len(self._messages)
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if not calls or choice([False, True]):
            message["content"] = self._word()
            kind = "text beside a call" if calls else "assistant messages"
            self._groups.append((kind, place, [(kind, message["content"])]))
        thoughts = choice([None, None, "reasoning_content", "thinking", "content"])
        if thoughts is not None:
            word = self._word()
            self._groups.append(("reasoning", place, [("reasoning", word)]))
            message[thoughts] = f"<think>\n{word}\n</think>\n\n{message['content']}" if thoughts == "content" else word
        if calls:
            message["tool_calls"] = [self._call(place, index) for index in range(calls)]
        self._messages.append(message)

    def _call(self, place: int, index: int) -> dict[str, Any]:
        words = [self._word() for _ in range(5)]
        number = next(self._numbers)
        arguments = {words[1]: words[2], words[3]: self._chance.choice([number, [number], {words[4]: number}])}
        parts = [("names of called tools", words[0])]
        parts += [("arguments of calls", word) for word in words[1:] if word in json.dumps(arguments)]
        parts.append(("arguments of calls", str(number)))
        self._groups.append(("calls after the first" if index else "calls", place, parts))
        written = json.dumps(arguments) if self._chance.choice([False, True]) else arguments
        name = words[0]
        identity = self._chance.choice([f"call{number:05d}", f"functions.{name}:{index}"])
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": written}}

    def _results(self) -> None:
        named = self._chance.choice([False, True])
        for call in self._messages[-1]["tool_calls"]:
            self._say("tool")
            self._messages[-1] |= {"tool_call_id": call["id"]} | ({"name": call["function"]["name"]} if named else {})

    def _tool(self) -> dict[str, Any]:
        name, described, parameter, meaning = (self._word() for _ in range(4))
        schema = {"type": "string", "description": meaning}
        parameters = {"type": "object", "properties": {parameter: schema}, "required": [parameter]}
        kinds = ("tool names", "tool descriptions", "tool parameters", "tool parameters")
        self._groups.append(("tools", None, list(zip(kinds, (name, described, parameter, meaning), strict=True))))
        return {"type": "function", "function": {"name": name, "description": described, "parameters": parameters}}
