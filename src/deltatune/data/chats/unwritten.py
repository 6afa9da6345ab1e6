"""Finds the parts of conversations that a chat template does not write: texts, calls, names and tools.

A part may be as short as a letter, and templates trim, quote and reformat texts. So a copy of the conversation is
rendered in which a mark, which stands nowhere else, replaces each part. Conversations of one shape share the copy.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...errors import UserError
from ..rows.row_formats import ASSISTANT, TOOL, TOOL_CALLS, Conversation
from ..rows.unread_columns import MARKS, is_absent
from .rendering import ChatRow
from .template_probes import REASONING, Messages

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
_NOTES = {
    THOUGHTS: "answers have reasoning that the model's chat template does not write, so it is not learnt.",
    BESIDE_A_CALL: f"answers have text beside a call of a tool, {_LEFT_OUT}, so it is not learnt; put the text into a "
    "message of its own before the call.",
    NAMES: f"messages have a name, {_LEFT_OUT}; where it matters, write it into the content.",
    CALLS: f"answers have a call of a tool, {_LEFT_OUT}, so it is not learnt; write it into the content.",
    LATER_CALLS: f"answers have calls after the first, {_LEFT_OUT}, so they are not learnt; give each call a message "
    "of its own, followed by its result.",
    CALLED_NAMES: f"answers call a tool by a name, {_LEFT_OUT}, so it is not learnt; where the template writes the id "
    "in its place (Kimi K2), give ids such as functions.NAME:0.",
    ARGUMENTS: f"answers have calls with arguments, some of {_LEFT_OUT}, so they are not learnt.",
    TOOLS: f"rows have {TOOLS!r}, which the model's chat template leaves out, so they are not learnt.",
    TOOL_NAMES: f"rows have tools with names, some of {_LEFT_OUT}.",
    DESCRIPTIONS: f"rows have tools with descriptions, some of {_LEFT_OUT}.",
    PARAMETERS: f"rows have tools with parameters, some of {_LEFT_OUT} in full (names and descriptions).",
}
_REMEDIES = {
    "developer messages": "give them the role 'system'",
    "system messages": "join their text to the first message",
    "tool messages": "give results as messages of the user",
}
# Templates read text in these tags as reasoning and as the result of a call.
_THINK_END = "</think>"
_TAGS = ("<think>", _THINK_END, "<tool_response>", "</tool_response>")
_FIRST_NUMBER = 931_000_000
# The keys of a message that are read one by one, or are no text.
_KNOWN = {"role", "content", "name", TOOL_CALLS, "tool_call_id", *REASONING, *MARKS}


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

    parts: tuple[tuple[str, int | None], ...]
    answers: tuple[int, ...]


@dataclass(frozen=True)
class MarkedCopy(Conversation):
    """A conversation with marks in place of its parts; those of one shape are equal."""

    groups: tuple[PartGroup, ...] = ()


def note(kind: str, count: int) -> str:
    """Return the sentence for the user on so many messages, or rows, with unwritten parts of a kind."""
    if kind in _NOTES:
        return f"{count:,} {_NOTES[kind]}"
    if kind.startswith("'"):
        return f"{count:,} messages have {kind}, {_LEFT_OUT}, so it is not learnt; write it into the content."
    remedy = _REMEDIES.get(kind, "write their text into messages of another role")
    return f"{count:,} {kind} are in no token, because the model's chat template does not write them; {remedy}."


class UnwrittenParts:
    """Counts, by kind, the messages, and the rows for tools, of which the chat template does not write some part.

    Reasoning is looked for in the answers that count, because templates drop it from the prompts of later ones.
    """

    def __init__(self, tokenizer: Any):
        thinking = (tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else ()
        self._tags = re.compile("(" + "|".join(map(re.escape, (*_TAGS, *thinking))) + ")")
        self._ends = (_THINK_END, *thinking[1:])
        # A conversation without a shape is one that cannot be copied.
        self._lost: dict[bytes, LostParts | None] = {b"": LostParts((), ())}
        self._before: Conversation | None = None
        self.counts = Counter[str]()

    def with_copy(self, conversation: Conversation) -> Iterator[Conversation]:
        """Yield the marked copy to be rendered, if its shape is new, and the conversation with its shape."""
        try:
            copy = self._marked(conversation)
        except RecursionError:
            yield conversation
            return
        if copy.shape not in self._lost:
            # No verdict is known of a shape until learn() gives one.
            self._lost[copy.shape] = None
            yield copy
        yield replace(conversation, shape=copy.shape)

    def learn(self, copy: MarkedCopy, rows: list[ChatRow] | UserError) -> None:
        """Note which marks stand in the rows of a copy; nothing where the template refuses it."""
        if not isinstance(rows, UserError):
            written = "\n".join(row.text for row in rows).lower()
            self._lost[copy.shape] = _lost(copy, lambda part: part.mark in written)

    def count(self, conversation: Conversation, rows: list[ChatRow]) -> None:
        """Count the parts of a conversation that stand in none of its rows; UserError if nothing of a counted answer
        does.

        Both conversations of a pair have the name of its row; the messages of their prompt are counted once.
        """
        lost = self._lost[conversation.shape]
        # A row of no text at all is refused by its tokens.
        if lost is None or (lost.answers and any(row.text for row in rows)):
            by_text = _lost(self._marked(conversation), lambda part: _stands(part.text, rows))
            silent = [] if lost is None else [turn for turn in lost.answers if turn in by_text.answers]
            if silent:
                raise UserError(
                    f"{conversation.source}: message {silent[0] + 1}: the model's chat template writes nothing of this "
                    "answer, so the model would learn to stop at once; remove this row, or give the message "
                    '"weight": 0.'
                )
            lost = lost or by_text
        self.counts.update(kind for kind, message in lost.parts if not self._is_counted(conversation, message))
        self._before = conversation

    def count_prompt(self, prompt: Conversation, write: Callable[[Messages, Any], str]) -> None:
        """Count the parts of a conversation that has no answer yet, which `write` renders with its tools."""
        for item in self.with_copy(prompt):
            rows: list[ChatRow] = []
            if isinstance(item, MarkedCopy) or self._lost[item.shape] is None:
                try:
                    rows = [ChatRow(write(item.messages, item.tools), [], len(item.messages), [], False)]
                except UserError:
                    continue
            if isinstance(item, MarkedCopy):
                self.learn(item, rows)
            else:
                self.count(item, rows)

    def _is_counted(self, conversation: Conversation, message: int | None) -> bool:
        """Whether the conversation before was of the same row, and had the same message in this place."""
        before = self._before
        if before is None or before.source != conversation.source:
            return False
        return message is None or before.messages[message : message + 1] == [conversation.messages[message]]

    def _marked(self, conversation: Conversation) -> MarkedCopy:
        return _Marking(self._tags, self._ends).copy(conversation)


def _lost(copy: MarkedCopy, stands: Callable[[MessagePart], bool]) -> LostParts:
    parts: dict[tuple[str, int | None], None] = {}
    silent = {group.message for group in copy.groups}
    for group in copy.groups:
        missing = [part for part in group.parts if not stands(part)]
        if len(missing) == len(group.parts):
            parts[group.kind, group.message] = None
        else:
            silent.discard(group.message)
            parts |= dict.fromkeys((part.kind, group.message) for part in missing)
    return LostParts(tuple(parts), tuple(turn for turn in copy.turns or [] if turn in silent))


def _stands(written: str, rows: list[ChatRow]) -> bool:
    """Whether a text stands in a row, as it is or as JSON writes it, but for white space around it."""
    text = written.strip()
    forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    return any(form in row.text for form in forms for row in rows)


class _Marking:
    """Makes the marked copy of one conversation; `tags` match texts that templates look for, `ends` end thoughts."""

    def __init__(self, tags: re.Pattern[str], ends: tuple[str, ...]):
        self._tags = tags
        self._ends = ends
        self._count = 0
        self._groups: list[PartGroup] = []
        self._ids: dict[str, str] = {}
        self._called: dict[str, str] = {}

    def copy(self, conversation: Conversation) -> MarkedCopy:
        """Return the copy, with the digest that conversations of one shape share."""
        tools = conversation.tools and [self._tool(tool) for tool in conversation.tools]
        turns = conversation.turns
        messages = [
            self._message(number, message, turns is None or number in turns)
            for number, message in enumerate(conversation.messages)
        ]
        content = json.dumps([messages, tools, turns, conversation.options], default=str)
        shape = hashlib.blake2b(content.encode(), digest_size=16).digest()
        fields = {**vars(conversation), "messages": messages, "tools": tools, "shape": shape}
        return MarkedCopy(**fields, groups=tuple(group for group in self._groups if group.parts))

    def _message(self, number: int, message: Mapping[str, Any], counts: bool) -> dict[str, Any]:
        marked = dict(message)
        role = message["role"]
        calls = message.get(TOOL_CALLS) or []
        kind = BESIDE_A_CALL if role == ASSISTANT and calls else f"{role} messages"
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
                marks[value] = marked[key] = marks.get(value) or self._mark(thoughts, THOUGHTS, value)
        marked |= {TOOL_CALLS: [self._call(number, *call) for call in enumerate(calls)]} if calls else {}
        if "tool_call_id" in message:
            marked["tool_call_id"] = self._id(message["tool_call_id"])
        name = message.get("name")
        if isinstance(name, str) and name.strip():
            # The name beside a result is that of its call, which stands in the tokens already.
            called = self._called.get(name) if role == TOOL else None
            named = text if text.parts else PartGroup(NAMES, number, [])
            marked["name"] = called or self._mark(named, NAMES, name)
            self._groups += [named] if named is not text else []
        self._groups += [text, thoughts] if counts or role != ASSISTANT else [text]
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
        assistant = group.kind in (BESIDE_A_CALL, f"{ASSISTANT} messages")
        for at in range(0, len(pieces), 2):
            piece = pieces[at].strip()
            if piece:
                reasons = assistant and at < max(ends, default=0)
                mark = self._mark(thoughts, THOUGHTS, piece) if reasons else self._mark(group, group.kind, piece)
                pieces[at] = mark if len(pieces) == 1 else pieces[at].replace(piece, mark)
        return "".join(pieces)

    def _call(self, number: int, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
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
        return marked | ({"id": self._call_id(call["id"], name, mark)} if "id" in call else {})

    def _value(self, value: Any, group: PartGroup) -> Any:
        """Return marks in place of the keys and values of arguments; absent ones stay, and are not looked for."""
        if is_absent(value) or (isinstance(value, str) and not value.strip()):
            return value
        if isinstance(value, Mapping):
            nowhere = PartGroup("", None, [])
            return {
                self._mark(nowhere if is_absent(inner) else group, ARGUMENTS, key): self._value(inner, group)
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

    def _call_id(self, value: Any, name: str, mark: str) -> Any:
        """Return the id of a call, in which its mark replaces the name of the tool: Kimi K2's are functions.NAME:0."""
        if isinstance(value, str):
            named = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", mark, value)
            self._ids |= {value: named} if named != value else {}
        return self._id(value)

    def _id(self, value: Any) -> Any:
        """Return an id of nine letters and digits, as Mistral's template asks; a call and its result share it."""
        return self._ids.setdefault(value, f"call{len(self._ids):05d}") if isinstance(value, str) else value

    def _tool(self, tool: Any) -> Any:
        """Return the copy of the description of a tool, in OpenAI's form or as the bare function."""
        if not isinstance(tool, Mapping):
            return tool
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            return tool
        group = PartGroup(TOOLS, None, [])
        self._groups.append(group)
        marked = {key: self._schema(value, group) for key, value in function.items()}
        for key, kind in (("name", TOOL_NAMES), ("description", DESCRIPTIONS)):
            value = function.get(key)
            if isinstance(value, str) and value.strip():
                marked[key] = self._mark(group, kind, value)
        return {**tool, "function": marked} if "function" in tool else marked

    def _schema(self, value: Any, group: PartGroup) -> Any:
        """Return a JSON schema with marks in place of the names of properties and of their descriptions."""
        if isinstance(value, list):
            return [self._schema(inner, group) for inner in value]
        if not isinstance(value, Mapping):
            return value
        properties, described = value.get("properties"), value.get("description")
        marked = {key: self._schema(inner, group) for key, inner in value.items() if key != "properties"}
        if isinstance(described, str) and described.strip():
            marked["description"] = self._mark(group, PARAMETERS, described)
        if isinstance(properties, Mapping):
            names = {name: self._mark(group, PARAMETERS, name) for name in properties}
            marked["properties"] = {names[name]: self._schema(inner, group) for name, inner in properties.items()}
            if isinstance(value.get("required"), list):
                required = value["required"]
                marked["required"] = [names.get(name, name) if isinstance(name, str) else name for name in required]
        return marked

    def _mark(self, group: PartGroup, kind: str, text: str) -> str:
        """Return a new mark, which is looked for as a part of the group."""
        self._count += 1
        mark = f"mk{self._count:06d}mk"
        group.parts.append(MessagePart(kind, mark, text))
        return mark
