"""Writes the Modelfile with which Ollama asks a GGUF file as the model's own chat template does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.chats.answers import ends, missing_end
from ..data.chats.template_probes import in_common
from ..data.prompts import conversation_text
from ..errors import UserError

Message = dict[str, Any]

# The content of each role's messages. A template that changes or drops one of them cannot be written for Ollama.
_SYSTEM = "SYSTEMTEXT"
_USER = "USERTEXT"
_ASSISTANT = "ASSISTANTTEXT"
_TOOL = "TOOLTEXT"
_CONTENTS = {"system": _SYSTEM, "user": _USER, "assistant": _ASSISTANT, "tool": _TOOL}
# Marks around the reasoning of an answer. Ollama hands an answer back with both, in its content.
_THINKING = ("<think>", "</think>")


@dataclass(frozen=True)
class Turns:
    """The text that a chat template writes around the contents of messages."""

    # The text before and behind a message, by its role. A message of another role leaves no text.
    around: Mapping[str, tuple[str, str]]
    # The text behind the last message, which begins the answer.
    opening: str

    def text(self, messages: Sequence[Message]) -> str:
        """Write a conversation, as Ollama would with template(): the contents alone, as they are."""
        turns = [message for message in messages if message["role"] in self.around]
        return "".join(message["content"].join(self.around[message["role"]]) for message in turns) + self.opening

    def template(self) -> str:
        """Return the template in Ollama's language, Go's templates."""
        cases = [
            f'{{{{ if eq .Role "{role}" }}}}{_escaped(before)}{{{{ .Content }}}}{_escaped(behind)}{{{{ end }}}}'
            for role, (before, behind) in self.around.items()
        ]
        return f"{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}{_escaped(self.opening)}"


def write_modelfile(
    path: Path,
    gguf: Path,
    tokenizer: Any,
    options: Mapping[str, Any] | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """Write a Modelfile for a GGUF file beside it; return sentences for the user.

    `options` are the variables of the chat template with which the model was trained, and `more` are further texts at
    which an answer ends.
    """
    lines = [f"FROM ./{gguf.name}"]
    notes = []
    if not tokenizer.has_chat_template:
        notes.append("The model has no chat template, so its Modelfile names the file alone.")
    else:
        wording, differing = turns(tokenizer, options)
        if wording is None:
            notes.append(
                f"The Modelfile has no TEMPLATE, since the model's chat template treats {', '.join(differing)} "
                "otherwise than the template of a Modelfile can: Ollama takes its own template for the file, so "
                "compare what it answers."
            )
        else:
            lines.append(f'TEMPLATE """{wording.template()}"""')
        stops = dict.fromkeys([*ends(tokenizer), *filter(None, [missing_end(tokenizer)]), *more])
        lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: the file cannot be written ({error.strerror}).") from error
    return [f"{path} is for Ollama, which was not tried here: ollama create NAME -f {path}", *notes]


def turns(tokenizer: Any, options: Mapping[str, Any] | None = None) -> tuple[Turns | None, list[str]]:
    """Find the texts that the chat template writes around messages, where they are the same for every conversation.

    They are found in short conversations, and compared with the text of the chat template for others. Returns the texts
    and no name; or None, and names of the messages that the chat template writes in another way.
    """

    def written(messages: Sequence[Message]) -> str | None:
        try:
            text = conversation_text(tokenizer, list(messages), "", options)
        except UserError:
            return None
        # llama.cpp writes the first token by itself.
        first = getattr(tokenizer, "bos_token", None)
        return text.removeprefix(first) if first else text

    wording = _wording_of(written)
    if wording is None or '"""' in wording.template():
        return None, ["messages"]
    differing = []
    for name, conversations in _probes(tokenizer).items():
        texts = [(written(messages), wording.text(messages)) for messages in conversations]
        # A conversation that the chat template refuses has no right text.
        if any(theirs not in (None, ours) for theirs, ours in texts):
            differing.append(name)
    return (None, differing) if differing else (wording, [])


def _probes(tokenizer: Any) -> dict[str, list[list[Message]]]:
    """Return conversations that chat templates write in ways of their own, by the name of their special feature."""
    system, question, answer, result = (_message(role) for role in _CONTENTS)
    marks = {_THINKING, (getattr(tokenizer, "think_start", None), getattr(tokenizer, "think_end", None))}
    thoughts = [
        {**answer, "content": f"{start}\nREASONTEXT\n{end}\n\n{_ASSISTANT}"} for start, end in marks if start and end
    ]
    spaced = [{**message, "content": f" \n{message['content']}\n "} for message in (system, question, answer)]
    calls = [_calling(arguments) for arguments in ({"key": "value"}, '{"key": "value"}')]
    return {
        "messages": [[*first, *[question, answer] * count, question] for count in range(3) for first in ([], [system])],
        "a later system message": [[question, answer, system, question]],
        "the reasoning of earlier answers": [[question, thought, question] for thought in thoughts],
        "results of tools": [[question, answer, result], [question, answer, result, result, answer, question]],
        "calls of tools": [[question, call, result] for call in calls],
        "white space around a message": [[*spaced, question], [question, spaced[2], spaced[1]]],
    }


def _message(role: str) -> Message:
    return {"role": role, "content": _CONTENTS[role]}


def _calling(arguments: Any) -> Message:
    """Return an answer that calls a tool; templates want its arguments as a mapping or as JSON."""
    call = {"id": "call00000", "type": "function", "function": {"name": "name", "arguments": arguments}}
    return {**_message("assistant"), "tool_calls": [call]}


def _wording_of(written: Callable[[Sequence[Message]], str | None]) -> Turns | None:
    system, question, answer, result = (_message(role) for role in _CONTENTS)
    one = written([question])
    two = written([question, answer, question])
    led = written([system, question])
    if one is None or two is None or led is None:
        return None
    if (one.count(_USER), two.count(_USER), two.count(_ASSISTANT), led.count(_SYSTEM)) != (1, 2, 1, 1):
        return None
    before, behind = one.split(_USER)
    first, middle, last = two.split(_USER)
    before_answer, behind_answer = middle.split(_ASSISTANT)
    # The text before the first message separates the end of one message from the beginning of the next.
    if first != before or last != behind or not behind_answer.endswith(before) or not led.endswith(f"{_USER}{behind}"):
        return None
    before_system, system_end = led.removesuffix(f"{_USER}{behind}").split(_SYSTEM)
    if not system_end.endswith(before):
        return None
    # Text that a question has in common before an answer and before the one that is to come ends the question, or opens
    # the answer; between two questions there is none to open.
    end_of_user = before_answer[: in_common(before_answer, behind)]
    between = (written([question, question]) or "").removeprefix(before).partition(_USER)[2].partition(_USER)[0]
    if between.endswith(before) and end_of_user.startswith(between.removesuffix(before)):
        end_of_user = between.removesuffix(before)
    around = {
        "system": (before_system, system_end.removesuffix(before)),
        "user": (before, end_of_user),
        "assistant": (before_answer.removeprefix(end_of_user), behind_answer.removesuffix(before)),
    }
    wording = Turns(around, behind.removeprefix(end_of_user))
    told = written([question, answer, result]) or ""
    asked = wording.text([question, answer]).removesuffix(wording.opening)
    if told.startswith(asked) and told.endswith(wording.opening) and told.count(_TOOL) == 1:
        before_result, behind_result = told.removeprefix(asked).removesuffix(wording.opening).split(_TOOL)
        around["tool"] = (before_result, behind_result)
    return wording


def _escaped(text: str) -> str:
    """Return a text as Go's templates write it literally."""
    return text.replace("{{", '{{ "{{" }}')
