"""Reads a row of data as a conversation or a plain text, whichever of the common formats it has."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...errors import UserError
from ...options.values import checked_options, nearest
from .unread_columns import (
    TEXT_KEYS,
    TOOLS,
    WEIGHT,
    is_absent,
    refuse_judged,
    refuse_unknown_keys,
    refuse_unread_marks,
    text_of,
    unmarked,
    unread,
)

TEXT = "text"
COMPLETION = "completion"
CHAT = "chat"
SHAREGPT = "ShareGPT"
ALPACA = "Alpaca"
CAPTION = "caption"
ASSISTANT = "assistant"
TOOL = "tool"
FUNCTIONS = "functions"
SYSTEM = "system"
TOOL_CALLS = "tool_calls"
# The variables of the chat template for one row, under the name that TRL gives them.
TEMPLATE_OPTIONS = "chat_template_kwargs"
_ALPACA = ("instruction", "input", "output")
# Who speaks in ShareGPT's rows, and the role that is meant.
_SPEAKERS = {
    "human": "user", "user": "user",
    "gpt": ASSISTANT, "assistant": ASSISTANT, "model": ASSISTANT, "chatgpt": ASSISTANT, "function_call": ASSISTANT,
    "system": SYSTEM,
    "tool": TOOL, "function": TOOL, "function_response": TOOL, "observation": TOOL,
}  # fmt: skip

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Features:
    """The keys under which a row holds its parts. The defaults are those of mlx_lm.lora."""

    prompt: str = "prompt"
    completion: str = "completion"
    chat: str = "messages"
    text: str = "text"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Features:
        """Return the keys that options such as prompt_feature name."""
        named = {name: options.get(f"{name}_feature") for name in ("prompt", "completion", "chat", "text")}
        return cls(**{name: key for name, key in named.items() if key is not None})


@dataclass(frozen=True)
class Conversation:
    """A conversation that is to be rendered, with the images and videos in its messages, in order.

    `turns` are the numbers of the messages that count in the loss, None if everything counts; with `every_turn` they
    are all of the assistant's. `options` are variables for the chat template, beside those of the run.
    """

    messages: Messages
    tools: list[Any] | None
    turns: list[int] | None
    every_turn: bool
    source: str
    options: dict[str, Any] = field(default_factory=dict)
    media: Sequence[Any] = ()


@dataclass(frozen=True)
class PlainText:
    """A text that needs no rendering, and where it came from."""

    text: str
    source: str


@dataclass
class RowFormats:
    """Reads rows with these keys, and counts their formats (`kinds`) and the columns that are not read (`unread`)."""

    features: Features
    kinds: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)

    def messages(self, row: Any, source: str) -> Messages | None:
        """Return the row's messages, or None for plain text; UserError, naming `source`, if it has no known format."""
        if not isinstance(row, Mapping):
            raise UserError(f"{source}: expected an object with {self._expected()}, got {type(row).__name__}.")
        kind = self._kind(row, source)
        if kind == TEXT:
            messages = None
        elif kind == COMPLETION:
            names = self.features
            prompt, answer = (messages_in_text(row[name]) for name in (names.prompt, names.completion))
            if isinstance(prompt, list) and isinstance(answer, list):
                messages = _all_checked(behind_prompt(prompt, answer, names.completion, source), source)
            else:
                messages = [
                    _message("user", row, names.prompt, source),
                    _message(ASSISTANT, row, names.completion, source),
                ]
        elif kind == ALPACA:
            messages = _alpaca(row, source)
        elif kind == CAPTION:
            # The turn of the user is the image alone.
            messages = [{"role": "user", "content": ""}, _message(ASSISTANT, row, CAPTION, source)]
        else:
            key = self.features.chat if kind == CHAT else "conversations"
            entries = typed({key: json_text(row[key], f"{source}: {key!r}")}, key, list, source)
            if entries and all(
                isinstance(entry, Mapping) and "role" not in entry and "from" in entry for entry in entries
            ):
                kind = SHAREGPT
                entries = _spoken(entries, source)
                if row.get(SYSTEM) and entries[0]["role"] != SYSTEM:
                    entries.insert(0, _message(SYSTEM, row, SYSTEM, source))
            elif kind == SHAREGPT:
                kind = CHAT
            messages = _all_checked(entries, source)
            if not any(message.get("content") or message.get(TOOL_CALLS) for message in messages):
                raise UserError(f"{source}: empty conversation: no message has content; remove this row.")
        # Beside plain text, which has no answer, other columns are of no concern.
        if kind != TEXT:
            read = {*vars(self.features).values(), *([SYSTEM] if kind in (SHAREGPT, ALPACA) else [])}
            read |= {CAPTION} if kind == CAPTION else set()
            refuse_judged(row, read, source)
            refuse_unread_marks(row, messages or [], source)
            self.unread.update(unread(row, read))
        self.kinds[kind] += 1
        return messages

    def text(self, row: Mapping[str, Any], source: str) -> PlainText:
        """Return the plain text of a row."""
        return PlainText(typed(row, self.features.text, str, source), source)

    @cached_property
    def _formats(self) -> dict[str, list[str]]:
        names = self.features
        formats = {
            COMPLETION: [names.prompt, names.completion],
            CHAT: [names.chat],
            SHAREGPT: ["conversations"],
            ALPACA: [_ALPACA[0], _ALPACA[2]],
            CAPTION: ["image", CAPTION],
            TEXT: [names.text],
        }
        named = set(vars(names).values()) - set(vars(Features()).values())
        # Without this, a row could be read under the default key of a format that the user did not ask for.
        return {kind: keys for kind, keys in formats.items() if not named or named.intersection(keys)}

    def _expected(self) -> str:
        return ", or ".join(" and ".join(f'"{key}"' for key in keys) for keys in self._formats.values())

    def _kind(self, row: Mapping[str, Any], source: str) -> str:
        """Return the format of a row: the first with all of its keys in the row."""
        formats = self._formats
        present = {key for key, value in row.items() if value is not None}
        # A column that is empty says nothing of the format, unless the row fits no other.
        for filled in (present_fields(row).keys(), present):
            for kind, keys in formats.items():
                if filled >= set(keys):
                    return kind
        known = [key for keys in formats.values() for key in keys]
        null = [key for key in known if key in row and key not in present]
        if null:
            raise UserError(f"{source}: {null[0]!r} is empty (null); fill it in, or remove this row.")
        hint = _column_hint(row)
        missing = [] if hint else [key for key in known if key not in row]
        got = ", ".join(repr(key) + ("" if key in known else nearest(str(key), missing)) for key in row)
        message = f"{source}: no known format: expected {self._expected()}, got {got or 'no key'}."
        raise UserError(f"{message} {hint}" if hint else message)


def tools_of(row: Mapping[str, Any], source: str) -> list[Any] | None:
    """Return the tools of a row, which may be JSON in a string; None if it has none.

    OpenAI's older form has them as "functions", bare, without a tool around each function.
    """
    name = TOOLS if row.get(TOOLS) else FUNCTIONS
    value = json_text(row.get(name), f"{source}: {name!r}")
    if is_absent(value):
        return None
    tools = typed({name: value}, name, list, source)
    return tools if name == TOOLS else [{"type": "function", "function": function} for function in tools]


def template_options_of(row: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the variables of the chat template that a row sets, which may be JSON in a string."""
    where = f"{source}: {TEMPLATE_OPTIONS!r}"
    value = json_text(row.get(TEMPLATE_OPTIONS), where)
    return {} if is_absent(value) else checked_options(value, where)


def present_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that say something: programs write null, "", [] and {} where a field is absent."""
    return {name: value for name, value in fields.items() if not is_absent(value)}


def behind_prompt(prompt: list[Any], answer: list[Any], name: str, source: str) -> list[Any]:
    """Return the messages of a prompt and of its answer, the column `name`; assistant turns of the answer alone count.

    A UserError refuses an answer that is empty, or says the prompt again.
    """
    if not answer:
        raise UserError(f"{source}: {name!r} has no message of its own; remove this row.")
    if prompt and [*map(_comparable, answer[: len(prompt)])] == [*map(_comparable, prompt)]:
        raise UserError(f"{source}: {name} repeats the prompt, so it would be read twice; give what follows it alone.")
    silent = [unmarked(one) if isinstance(one, Mapping) and one.get("role") == ASSISTANT else one for one in prompt]
    return [*silent, *answer]


def _comparable(message: Any) -> Any:
    """Return a message in the form that all ways to write the same message share."""
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = text_of(content)
    return present_fields({**message, "content": content})


def json_text(value: Any, where: str) -> Any:
    """Return the list or object in a JSON text, as cells of a CSV file hold one, or another value as it is."""
    return _json(value, where) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value


def messages_in_text(value: Any) -> Any:
    """Return the messages that a text holds as JSON, as cells of a CSV file do, or any other value as it is."""
    try:
        parsed = json_text(value, "")
    except UserError:
        return value
    are_messages = (
        isinstance(parsed, list) and parsed and all(isinstance(one, dict) and "role" in one for one in parsed)
    )
    return parsed if are_messages else value


def join_text_parts(messages: Messages, source: str) -> Messages:
    """Return the messages with each content that is a list of text parts as one string."""
    joined = []
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                    raise UserError(
                        f'{source}: message {number}: expected parts {{"type": "text", "text": ...}} for this model, '
                        f"got {short(part)}."
                    )
                refuse_unknown_keys(part, TEXT_KEYS, f"{source}: message {number}: a part with text")
            message = {**message, "content": "".join(part["text"] for part in content)}
        joined.append(message)
    return joined


def _alpaca(row: Mapping[str, Any], source: str) -> Messages:
    """Return an Alpaca row as messages: the instruction, a blank line and the input are the prompt."""
    instruction, context, output = _ALPACA
    prompt = _message("user", row, instruction, source)
    if row.get(context):
        prompt["content"] += "\n\n" + typed(row, context, str, source)
    system = [_message(SYSTEM, row, SYSTEM, source)] if row.get(SYSTEM) else []
    return [*system, *_history(row, source), prompt, _message(ASSISTANT, row, output, source)]


def _history(row: Mapping[str, Any], source: str) -> Messages:
    messages: Messages = []
    for number, turn in enumerate(typed(row, "history", list, source) if row.get("history") else [], 1):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise UserError(f"{source}: 'history' {number}: expected [question, answer], got {short(turn)}.")
        messages += [{"role": "user", "content": turn[0]}, {"role": ASSISTANT, "content": turn[1], WEIGHT: 0}]
    return messages


def _message(role: str, row: Mapping[str, Any], key: str, source: str) -> dict[str, Any]:
    return {"role": role, "content": typed(row, key, str, source)}


def _spoken(entries: list[Any], source: str) -> Messages:
    messages = []
    for number, entry in enumerate(entries, 1):
        where = f"{source}: message {number}"
        speaker = entry["from"]
        value = entry.get("value")
        if speaker not in _SPEAKERS:
            raise UserError(f'{where}: expected "from" to be one of {", ".join(_SPEAKERS)}, got {speaker!r}.')
        message = {"role": _SPEAKERS[speaker], "content": value}
        if speaker == "function_call":
            calls = _json(value, where) if isinstance(value, str) else value
            message = {"role": ASSISTANT, "content": "", TOOL_CALLS: calls if isinstance(calls, list) else [calls]}
        messages.append({name: entry[name] for name in entry if name not in ("from", "value")} | message)
    return messages


def _all_checked(messages: list[Any], source: str) -> Messages:
    return [_checked(message, number, source) for number, message in enumerate(messages, 1)]


def _checked(message: Any, number: int, source: str) -> dict[str, Any]:
    """Return a message without empty fields after checking its role, its content and its calls of tools."""
    where = f"{source}: message {number}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f'{where}: expected {{"role": ..., "content": ...}}, got {short(message)}.')
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise UserError(f'{where}: expected a string as "content", got {short(content)}.')
    called = message.get(TOOL_CALLS) or message.get("function_call")
    if content is None and message["role"] != ASSISTANT and not called:
        raise UserError(
            f'{where}: "content" is missing or null; expected a text. Write "" where it is meant to be empty.'
        )
    # OpenAI's older form has one call in place of a list, and the role "function" for its result.
    role = TOOL if message["role"] == "function" else message["role"]
    # Many templates refuse a message without content, or write "None".
    message = {**present_fields(message), "role": role, "content": content or ""}
    if "function_call" in message and TOOL_CALLS not in message:
        message[TOOL_CALLS] = [message["function_call"]]
    if TOOL_CALLS not in message:
        return message
    calls = typed(message, TOOL_CALLS, list, where)
    return {**message, TOOL_CALLS: [_call(call, f"{where}: tool call {index}") for index, call in enumerate(calls, 1)]}


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a call of a tool in OpenAI's form. Its arguments stay as the row has them, once they are checked."""
    call = present_fields(call) if isinstance(call, Mapping) else call
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UserError(f'{where}: expected {{"function": {{"name": ..., "arguments": ...}}}}, got {short(call)}.')
    written = arguments = function.get("arguments")
    if isinstance(written, str):
        arguments = _json(written, f"{where}: 'arguments'") if written.strip() else {}
    if not isinstance(arguments, Mapping | None):
        raise UserError(
            f"{where}: 'arguments': expected an object, or a string that holds one, got {short(arguments)}."
        )
    function = {**present_fields(function), "arguments": written if arguments else {}}
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: expected JSON, got {short(text)} ({error}).") from error


def typed(row: Mapping[str, Any], key: str, kind: type, source: str) -> Any:
    """Return the value of a key after checking that it is a list or a string, as `kind` says."""
    value = row[key]
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "a string"
        raise UserError(f"{source}: {key!r}: expected {expected}, got {short(value)}.")
    return value


def short(value: Any) -> str:
    """Return the type and the beginning of a value, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


# Names of columns in other data sets, by the name of our column in their place.
_MEANT = {
    "prompt": ("question", "query", "input", "instruction", "problem", "request", "user", "source"),
    "completion": ("answer", "response", "output", "reply", "solution", "assistant", "target", "summary"),
    "chat": ("messages", "chats", "dialogue", "dialog", "conversation", "conversations", "history", "turns"),
    "text": ("content", "document", "body", "passage"),
}


def _column_hint(row: Mapping[str, Any]) -> str:
    """Return a sentence on how to read a row with these columns, or an empty string if nothing is known about them."""
    names = [str(key) for key in row]
    if {"chosen", "rejected"} <= set(names):
        return "To learn which of two answers is better, give --loss dpo."
    if {"preferred_output", "non_preferred_output"} <= set(names):
        return (
            'To learn which of two answers is better, write the messages of "input" as "prompt" and the two outputs as '
            '"chosen" and "rejected", and give --loss dpo.'
        )
    flags: dict[str, str] = {}
    # Of "The Answer " the last word counts, where no column is called "answer" alone.
    words_of = {name: re.findall(r"[^\W_]+", name.lower()) for name in names}
    for kind, words in _MEANT.items():
        ending = [name for name in names if {kind, *words} & {*words_of[name][-1:]}]
        matching = sorted(ending, key=lambda name: len(words_of[name]))
        if matching:
            # A column of our own name needs no flag.
            flags[kind] = "" if kind in names else f"--{kind}-column {shlex.quote(matching[0])}"
    pair = [flags[kind] for kind in ("prompt", "completion") if kind in flags]
    chosen = pair if len(pair) == 2 else [flags[kind] for kind in ("chat", "text") if kind in flags][:1]
    flags_to_give = " ".join(filter(None, chosen))
    if flags_to_give:
        return f"To read these columns, give {flags_to_give}."
    inside = row[names[0]] if len(names) == 1 else None
    # Messages under a mistyped name are no rows.
    rows = inside if isinstance(inside, list) else []
    if rows and all(isinstance(one, Mapping) and "role" not in one for one in rows):
        return f"If {names[0]!r} holds the rows, write its list alone into the file."
    return ""
