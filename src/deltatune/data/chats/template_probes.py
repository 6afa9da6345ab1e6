"""Probes a chat template with short conversations: which form of arguments it takes, which text ends an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jinja2

Messages = list[dict[str, Any]]
Write = Callable[[Messages], str]

# How a template wants the arguments of a tool call: as a mapping, as JSON in a text, or as the row has them.
MAPPING = "mapping"
TEXT = "text"
GIVEN = "given"
_ARGUMENTS = {"key": "value"}
# Texts that no template writes by itself.
_QUESTION = "deltatune asks"
_ANSWER = "deltatune answers"
_NEXT = "deltatune goes on"
_THOUGHT = "deltatune thinks"
# The keys under which a message holds the reasoning before its answer.
REASONING = ("reasoning_content", "reasoning", "thinking")
# Mistral's templates want nine letters or digits.
_ID = "call00000"
# The errors with which a template refuses a conversation.
REFUSED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, jinja2.TemplateError)


def argument_form(write: Write) -> str:
    """Return the form in which a template takes the arguments of tool calls: MAPPING, TEXT or GIVEN.

    A template that joins texts refuses a mapping, or writes it as Python does. One that reads arguments by name refuses
    a text, or writes it as a text within JSON. One that takes both alike gets the row's own form, as from mlx_lm.lora.
    """
    as_mapping, as_text = (_tried(write, _asked(_call(form))) for form in (_ARGUMENTS, json.dumps(_ARGUMENTS)))
    if as_text is not None and (as_mapping is None or str(_ARGUMENTS) in as_mapping):
        return TEXT
    return GIVEN if as_mapping is not None and as_mapping == as_text else MAPPING


def with_arguments(messages: Messages, form: str) -> Messages:
    """Return the messages with the arguments of every tool call in this form."""
    if form == GIVEN:
        return messages
    return [
        {**message, "tool_calls": [_converted(call, form) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def calls_tools(messages: Messages) -> bool:
    """Return whether a message calls a tool."""
    return any(message.get("tool_calls") for message in messages)


def behind_an_answer(write: Write, *, tools: bool) -> str | None:
    """Return the text that a template writes between an answer and the next message; None if it refuses to.

    With `tools` the answer calls a tool, the text of the call is a part of this, and the next message is the result.
    """
    follows = {"role": "tool", "tool_call_id": _ID, "name": "name"} if tools else {"role": "user"}
    text = _tried(write, [*_answered(write, tools), {**follows, "content": _NEXT}])
    return None if text is None else _between(text, _ANSWER, _NEXT)


def behind_the_last_answer(write: Write, *, tools: bool) -> str | None:
    """Return a template's text behind an answer that ends a conversation, as behind_an_answer does."""
    return _behind(_ANSWER, _tried(write, _answered(write, tools)))


def behind_the_question(write: Write) -> str | None:
    """Return a template's text behind a last question; None if it refuses to."""
    return _behind(_QUESTION, _tried(write, [{"role": "user", "content": _QUESTION}]))


def around_content(write: Write) -> str:
    """Return the text that a template writes between a question and an answer without reasoning; "" if it refuses."""
    return _between(_tried(write, _answered(write, False)) or "", _QUESTION, _ANSWER) or ""


def around_reasoning(write: Write, key: str) -> tuple[str, str] | None:
    """Return a template's texts between a question and the reasoning of its answer, and from there to the content.

    The reasoning stands under `key` of the message; None says that the template leaves it out. Kimi K2 Thinking's
    writes the reasoning of answers that call a tool alone, so these are tried, too.
    """
    for tools in (False, True):
        question, answer = _answered(write, tools)
        text = _tried(write, [question, {**answer, key: _THOUGHT}]) or ""
        opening, between = _between(text, _QUESTION, _THOUGHT), _between(text, _THOUGHT, _ANSWER)
        if between and _ARGUMENTS["key"] in between:
            # Gemma 4's template writes calls before the content, where they belong to an answer without reasoning, too.
            plain = (_tried(write, [question, answer]) or "").partition(_ANSWER)[0]
            between = between[: len(between) - in_common(between[::-1], plain[::-1])]
        if opening is not None and between is not None and between.strip():
            return opening, between
    return None


def in_common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginnings."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def first_of(tokens: Sequence[str], text: str) -> str | None:
    """Return the one of these tokens that stands first in a text; None if none does."""
    places = [(text.index(token), -len(token), token) for token in tokens if token and token in text]
    return min(places)[2] if places else None


def _answered(write: Write, tools: bool) -> Messages:
    """Return a question and its answer, which calls a tool where it is to."""
    if not tools:
        return _asked({"role": "assistant", "content": _ANSWER})
    return with_arguments(_asked(_call(_ARGUMENTS)), argument_form(write))


def _asked(answer: dict[str, Any]) -> Messages:
    return [{"role": "user", "content": _QUESTION}, answer]


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "name", "arguments": arguments}
    calls = [{"id": _ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": _ANSWER, "tool_calls": calls}


def _converted(call: dict[str, Any], form: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if form == MAPPING and isinstance(arguments, str):
        arguments = json.loads(arguments)
    elif form == TEXT and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _tried(write: Write, messages: Messages) -> str | None:
    try:
        return write(messages)
    except REFUSED:
        return None


def _behind(mark: str, text: str | None) -> str | None:
    return None if text is None or mark not in text else text[text.rindex(mark) + len(mark) :]


def _between(text: str, first: str, last: str) -> str | None:
    start, end = text.rfind(first), text.rfind(last)
    return text[start + len(first) : end] if 0 <= start < end else None
