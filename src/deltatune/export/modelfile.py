"""Writes the Modelfile with which Ollama asks a GGUF file as the model's own chat template does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.chats.answer_ends import ends, missing_end
from ..data.chats.template_probes import in_common
from ..data.prompts import conversation_text
from ..errors import UserError

# Texts that stand for what is said. A template that changes or drops one of them cannot be written for Ollama.
_SYSTEM, _USER, _ASSISTANT = "SYSTEMTEXT", "USERTEXT", "ASSISTANTTEXT"
_SAID = {"system": _SYSTEM, "user": _USER, "assistant": _ASSISTANT}


@dataclass(frozen=True)
class Turns:
    """What a chat template writes around what is said.

    Attributes:
        around: The text before and behind a message, by its role.
        opening: The text behind the last message, which begins the answer.
    """

    around: Mapping[str, tuple[str, str]]
    opening: str

    def text(self, roles: list[str]) -> str:
        """Write a conversation of these roles, as Ollama would with template()."""
        return "".join(f"{self.around[role][0]}{_SAID[role]}{self.around[role][1]}" for role in roles) + self.opening

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
    """Write a Modelfile for a GGUF file beside it.

    Args:
        path: The file to write.
        gguf: The GGUF file.
        tokenizer: mlx-lm's wrapper of the model's tokenizer.
        options: The variables of the chat template with which the model was trained.
        more: Further texts at which an answer ends.

    Returns:
        Sentences for the user.
    """
    lines, notes = [f"FROM ./{gguf.name}"], []
    if not tokenizer.has_chat_template:
        notes.append("The model has no chat template, so its Modelfile names the file alone.")
    else:
        wording = turns(tokenizer, options)
        if wording is None or '"""' in wording.template():
            notes.append(
                "The model's chat template is more than a text around each message, which is all that a Modelfile can "
                "say: Ollama takes its own template for the file, so compare what it answers."
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


def turns(tokenizer: Any, options: Mapping[str, Any] | None = None) -> Turns | None:
    """Find what the chat template writes around messages; None if that is not the same for every conversation.

    It is found in one conversation and compared with what the template writes for others, with a system message and
    without, of one to three questions.
    """

    def written(roles: list[str]) -> str | None:
        messages = [{"role": role, "content": _SAID[role]} for role in roles]
        try:
            text = conversation_text(tokenizer, messages, "", options)
        except UserError:
            return None
        # llama.cpp writes the first token by itself.
        first = getattr(tokenizer, "bos_token", None)
        return text.removeprefix(first) if first else text

    wording = _wording_of(written)
    if wording is None:
        return None
    for count in (1, 2, 3):
        asked = ["user", "assistant"] * (count - 1) + ["user"]
        for system in ([], ["system"]):
            if written([*system, *asked]) != wording.text([*system, *asked]):
                return None
    return wording


def _wording_of(written: Any) -> Turns | None:
    one, two, told = written(["user"]), written(["user", "assistant", "user"]), written(["system", "user"])
    if one is None or two is None or told is None:
        return None
    if (one.count(_USER), two.count(_USER), two.count(_ASSISTANT), told.count(_SYSTEM)) != (1, 2, 1, 1):
        return None
    before, behind = one.split(_USER)
    first, middle, last = two.split(_USER)
    before_answer, behind_answer = middle.split(_ASSISTANT)
    # Between two messages, what ends the one is told from what begins the other by the text before the first.
    if first != before or last != behind or not behind_answer.endswith(before) or not told.endswith(f"{_USER}{behind}"):
        return None
    before_system, system_end = told.removesuffix(f"{_USER}{behind}").split(_SYSTEM)
    if not system_end.endswith(before):
        return None
    # Whatever stands behind a question, before an answer and before the one that is to come, ends the question.
    end_of_user = before_answer[: in_common(before_answer, behind)]
    return Turns(
        {
            "system": (before_system, system_end.removesuffix(before)),
            "user": (before, end_of_user),
            "assistant": (before_answer.removeprefix(end_of_user), behind_answer.removesuffix(before)),
        },
        behind.removeprefix(end_of_user),
    )


def _escaped(text: str) -> str:
    """Return a text as Go's templates write it literally."""
    return text.replace("{{", '{{ "{{" }}')
