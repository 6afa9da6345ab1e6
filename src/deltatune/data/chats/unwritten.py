"""Finds the parts of conversations that a chat template does not write: texts, calls, names and tools.

A part may be as short as a letter, and templates trim, quote and reformat texts. So a copy of the conversation is
rendered in which a mark, which stands nowhere else, replaces each part. Conversations of one shape share the copy.
render_process.py runs this file without deltatune, so it imports nothing but its neighbours.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .chat_rows import RefusalError
from .template_probes import REASONING

THOUGHTS = "reasoning"
BESIDE_A_CALL = "text beside a call"
NAMES = "names"
CALLS = "calls"
LATER_CALLS = "calls after the first"
CALLED_NAMES = "names of called tools"
ARGUMENTS = "arguments of calls"
TOOLS = "tools"
TOOL_NAMES = "tool names"
DESCRIPTIONS = "tool descriptions"
PARAMETERS = "tool parameters"
_LEFT_OUT = "which the model's chat template does not write"
# By kind: what has such parts, and what they are, behind "has" or "have".
_NOTES = {
    THOUGHTS: ("answer", "reasoning that the model's chat template does not write, so it is not learnt"),
    BESIDE_A_CALL: ("answer", f"text beside a call of a tool, {_LEFT_OUT}, so it is not learnt; put the text into a "
                    "message of its own before the call"),
    NAMES: ("message", f"a name, {_LEFT_OUT}; where it matters, write it into the content"),
    CALLS: ("answer", f"a call of a tool, {_LEFT_OUT}, so it is not learnt; write it into the content"),
    LATER_CALLS: ("answer", f"calls after the first, {_LEFT_OUT}, so they are not learnt; give each call a message of "
                  "its own, followed by its result"),
    CALLED_NAMES: ("answer", f"a call of a tool by a name, {_LEFT_OUT}, so it is not learnt; where the template writes "
                   "the id in its place (Kimi K2), give ids such as functions.NAME:0"),
    ARGUMENTS: ("answer", f"calls with arguments, some of {_LEFT_OUT}, so they are not learnt"),
    TOOLS: ("row", f"{TOOLS!r}, which the model's chat template leaves out, so they are not learnt"),
    TOOL_NAMES: ("row", f"tools with names, some of {_LEFT_OUT}"),
    DESCRIPTIONS: ("row", f"tools with descriptions, some of {_LEFT_OUT}"),
    PARAMETERS: ("row", f"tools with parameters, some of {_LEFT_OUT} in full (names and descriptions)"),
}  # fmt: skip
_REMEDIES = {
    "developer messages": "use the role 'system'",
    "system messages": "join the text to the first message",
    "tool messages": "give results as messages of the user",
}
# Templates read text in these tags as reasoning and as the result of a call.
_THINK_END = "</think>"
_TAGS = ("<think>", _THINK_END, "<tool_response>", "</tool_response>")
_FIRST_NUMBER = 931_000_000
# The keys of a message that are read one by one.
_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", *REASONING}


class MessagePart(NamedTuple):
    """A part of a conversation, counted as `kind` where it alone is not written, with the mark in its place in the
    copy.

    `text` is the part in the conversation itself; "" for true and false, which templates write variously.
    """

    kind: str
    mark: str
    text: str


class PartGroup(NamedTuple):
    """Parts that are counted once, as `kind`, where none of them is written; `message` is None for a tool."""

    kind: str
    message: int | None
    parts: list[MessagePart]


class LostParts(NamedTuple):
    """The kinds of the parts that are not written, each with its message, and the answers of which nothing is."""

    parts: list[tuple[str, int | None]]
    answers: list[int]


def note(kind: str, count: int) -> str:
    """Return the sentence for the user on so many messages, or rows, with unwritten parts of a kind."""
    one = count == 1
    whose, text = _NOTES.get(kind, ("message", f"{kind}, {_LEFT_OUT}, so it is not learnt; write it into the content"))
    if kind in _NOTES or kind.startswith("'"):
        return f"{count:,} {whose}{' has' if one else 's have'} {text}."
    remedy = _REMEDIES.get(kind, "write the text into messages of another role")
    return (
        f"{count:,} {f'{kind[:-1]} is' if one else f'{kind} are'} in no token, because the model's chat template does "
        f"not write {'it' if one else 'them'}; {remedy}."
    )


class UnwrittenParts:
    """Finds the parts of conversations that one chat template leaves out; `thinking` are its tags around reasoning.

    Reasoning is looked for in the answers that count, because templates drop it from the prompts of later ones.
    """

    def __init__(self, thinking: Sequence[str]):
        self._tags = re.compile("(" + "|".join(map(re.escape, (*_TAGS, *thinking))) + ")")
        self._ends = (_THINK_END, *thinking[1:])
        self._lost: dict[bytes, LostParts | None] = {}

    def of(
        self, request: dict[str, Any], texts: list[str], write: Callable[[dict[str, Any]], str | None]
    ) -> list[tuple[str, int | None]]:
        """Return the kinds of the parts of a conversation that stand in none of its texts, each with its message.

        `write` renders a copy, and returns None where the template refuses it: the row's own texts are looked for then.
        A RefusalError says that nothing of an answer that counts is written.
        """
        try:
            copy = _Copy(request, self._tags, self._ends)
        except RecursionError:
            return []
        if copy.shape not in self._lost:
            written = write(copy.request)
            self._lost[copy.shape] = None if written is None else copy.lost(lambda part: part.mark in written.lower())
        lost = self._lost[copy.shape]
        # A row of no text at all is refused by its tokens.
        if lost is None or (lost.answers and any(texts)):
            by_text = copy.lost(lambda part: _stands(part.text, texts))
            silent = [] if lost is None else [turn for turn in lost.answers if turn in by_text.answers]
            if silent:
                raise RefusalError(
                    f"message {silent[0] + 1}: the model's chat template writes nothing of this answer, so the model "
                    'would learn to stop at once; remove this row, or give the message "weight": 0.'
                )
            lost = lost or by_text
        return lost.parts


def _stands(written: str, texts: list[str]) -> bool:
    """Whether a text stands in another, as it is or as JSON writes it, but for white space around it."""
    text = written.strip()
    forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    return any(form in whole for form in forms for whole in texts)


def _is_blank(value: Any) -> bool:
    return value in (None, [], {}) or (isinstance(value, str) and not value.strip())


class _Copy:
    """The copy of a request, with marks in place of its parts; `shape` is a digest, the same for all of one shape.

    `tags` match texts that templates look for, and `ends` end thoughts.
    """

    def __init__(self, request: dict[str, Any], tags: re.Pattern[str], ends: tuple[str, ...]):
        self._tags = tags
        self._ends = ends
        self._count = 0
        self._groups: list[PartGroup] = []
        self._ids: dict[str, str] = {}
        self._called: dict[str, str] = {}
        self._turns = request["turns"]
        tools = request["tools"] and [self._tool(tool) for tool in request["tools"]]
        messages = [self._message(number, message) for number, message in enumerate(request["messages"])]
        self.request = request | {"messages": messages, "tools": tools}
        self.shape = hashlib.blake2b(json.dumps(self.request, default=str).encode(), digest_size=16).digest()

    def lost(self, stands: Callable[[MessagePart], bool]) -> LostParts:
        """Return the parts that do not stand in a text, as `stands` says."""
        parts: dict[tuple[str, int | None], None] = {}
        groups = [group for group in self._groups if group.parts]
        silent = {group.message for group in groups}
        for group in groups:
            missing = [part for part in group.parts if not stands(part)]
            if len(missing) == len(group.parts):
                parts[group.kind, group.message] = None
            else:
                silent.discard(group.message)
                parts |= dict.fromkeys((part.kind, group.message) for part in missing)
        return LostParts(list(parts), [turn for turn in self._turns or [] if turn in silent])

    def _message(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        marked = dict(message)
        role = message["role"]
        calls = message.get("tool_calls") or []
        kind = BESIDE_A_CALL if role == "assistant" and calls else f"{role} messages"
        text, thoughts = PartGroup(kind, number, []), PartGroup(THOUGHTS, number, [])
        content = message["content"]
        if isinstance(content, str):
            marked["content"] = self._text(content, text, thoughts)
        else:
            marked["content"] = [
                {**part, "text": self._text(part["text"], text, thoughts)} if "text" in part else part
                for part in content
            ]
        marks: dict[str, str] = {}
        for key in REASONING:
            value = message.get(key)
            if isinstance(value, str) and value.strip():
                # One reasoning under two keys is written once.
                marked[key] = marks[value] = marks.get(value) or self._mark(thoughts, THOUGHTS, value)
        marked |= {"tool_calls": [self._call(number, *call) for call in enumerate(calls)]} if calls else {}
        if "tool_call_id" in message:
            marked["tool_call_id"] = self._id(message["tool_call_id"])
        name = message.get("name")
        if isinstance(name, str) and name.strip():
            # The name beside a result is that of its call, which stands in the tokens already.
            called = self._called.get(name) if role == "tool" else None
            named = text if text.parts else PartGroup(NAMES, number, [])
            marked["name"] = called or self._mark(named, NAMES, name)
            self._groups += [named] if named is not text else []
        counts = self._turns is None or number in self._turns
        self._groups += [text, thoughts] if counts or role != "assistant" else [text]
        for key, value in message.items():
            # A text has more than one word; the ids and choices that other programs write have not.
            if key not in _KNOWN and isinstance(value, str) and len(value.split()) > 1:
                other = PartGroup(repr(key), number, [])
                marked[key] = self._mark(other, other.kind, value)
                self._groups.append(other)
        return marked

    def _text(self, text: str, group: PartGroup, thoughts: PartGroup) -> str:
        """Return marks in place of a text, around the tags in it; reasoning ends with a tag, too."""
        pieces = self._tags.split(text)
        ends = [at for at, piece in enumerate(pieces) if piece in self._ends]
        assistant = group.kind in (BESIDE_A_CALL, "assistant messages")
        for at in range(0, len(pieces), 2):
            piece = pieces[at].strip()
            if piece:
                reasons = assistant and at < max(ends, default=0)
                mark = self._mark(thoughts, THOUGHTS, piece) if reasons else self._mark(group, group.kind, piece)
                pieces[at] = mark if len(pieces) == 1 else pieces[at].replace(piece, mark)
        return "".join(pieces)

    def _call(self, number: int, index: int, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        group = PartGroup(LATER_CALLS if index else CALLS, number, [])
        mark = self._called[name] = self._mark(group, CALLED_NAMES, name)
        self._groups.append(group)
        if isinstance(arguments, str):
            arguments = json.dumps(self._value(json.loads(arguments), group))
        else:
            arguments = self._value(arguments, group)
        marked = {**call, "function": {**function, "name": mark, "arguments": arguments}}
        return marked | ({"id": self._id(call["id"], name, mark)} if "id" in call else {})

    def _value(self, value: Any, group: PartGroup) -> Any:
        """Return marks in place of the keys and values of arguments; absent ones stay, and are not looked for."""
        if _is_blank(value):
            return value
        if isinstance(value, dict):
            nowhere = PartGroup("", None, [])
            return {
                self._mark(nowhere if _is_blank(inner) else group, ARGUMENTS, key): self._value(inner, group)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [self._value(inner, group) for inner in value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self._mark(group, ARGUMENTS, value if isinstance(value, str) else "")
        self._count += 1
        number = _FIRST_NUMBER + self._count
        group.parts.append(MessagePart(ARGUMENTS, str(number), str(value)))
        return number if isinstance(value, int) else number + 0.5

    def _id(self, value: Any, name: str | None = None, mark: str = "") -> Any:
        """Return an id of nine letters and digits, as Mistral's template asks; a call and its result share it.

        In the id of a call, the mark replaces the name of the tool: Kimi K2's are functions.NAME:0.
        """
        if not isinstance(value, str):
            return value
        if name is not None:
            named = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", mark, value)
            self._ids |= {value: named} if named != value else {}
        return self._ids.setdefault(value, f"call{len(self._ids):05d}")

    def _tool(self, tool: Any) -> Any:
        """Return the copy of the description of a tool, in OpenAI's form or as the bare function."""
        if not isinstance(tool, dict):
            return tool
        function = tool.get("function", tool)
        if not isinstance(function, dict):
            return tool
        group = PartGroup(TOOLS, None, [])
        self._groups.append(group)
        marked = {key: self._schema(value, group) for key, value in function.items()}
        marked |= self._texts(function, {"name": TOOL_NAMES, "description": DESCRIPTIONS}, group)
        return {**tool, "function": marked} if "function" in tool else marked

    def _schema(self, value: Any, group: PartGroup) -> Any:
        """Return a JSON schema with marks in place of the names of properties and of their descriptions."""
        if isinstance(value, list):
            return [self._schema(inner, group) for inner in value]
        if not isinstance(value, dict):
            return value
        properties = value.get("properties")
        marked = {key: self._schema(inner, group) for key, inner in value.items() if key != "properties"}
        marked |= self._texts(value, {"description": PARAMETERS}, group)
        if isinstance(properties, dict):
            names = {name: self._mark(group, PARAMETERS, name) for name in properties}
            marked["properties"] = {names[name]: self._schema(inner, group) for name, inner in properties.items()}
            if isinstance(value.get("required"), list):
                required = value["required"]
                marked["required"] = [names.get(name, name) if isinstance(name, str) else name for name in required]
        return marked

    def _texts(self, fields: dict[str, Any], kinds: dict[str, str], group: PartGroup) -> dict[str, str]:
        """Return marks in place of those fields of a schema that have a kind, where they are texts."""
        texts = {key: fields.get(key) for key in kinds}
        return {
            key: self._mark(group, kinds[key], text)
            for key, text in texts.items()
            if isinstance(text, str) and text.strip()
        }

    def _mark(self, group: PartGroup, kind: str, text: str) -> str:
        """Return a new mark, which is looked for as a part of the group."""
        self._count += 1
        mark = f"mk{self._count:06d}mk"
        group.parts.append(MessagePart(kind, mark, text))
        return mark
