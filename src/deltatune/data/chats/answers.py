"""Tells where an answer ends in a chat template, and its reasoning from its content."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ...upstream import hugging_face_tokenizer
from .rendering import Renderer, special_tokens
from .template_probes import (
    REASONING,
    Messages,
    around_content,
    around_reasoning,
    behind_the_last_answer,
    behind_the_question,
    first_of,
    in_common,
)


def missing_end(tokenizer: Any) -> str | None:
    """Return the token that ends an answer in the chat template, if generation stops at no token there; else None.

    So it is with base models. Their configs, as Qwen3-Base's, name the end of a text alone: trained on chats, they
    learn to write the template's end, and go on behind it.
    """
    if not tokenizer.has_chat_template:
        return None
    tail = behind_the_last_answer(Renderer(tokenizer).text, tools=False)
    if tail is None or first_of(ends(tokenizer), tail):
        return None
    return first_of(special_tokens(hugging_face_tokenizer(tokenizer)), tail)


def ends(tokenizer: Any) -> list[str]:
    """Return the tokens at which generation stops, as they are written."""
    inner = hugging_face_tokenizer(tokenizer)
    return [inner.decode([number]) for number in sorted(tokenizer.eos_token_ids)]


def ending_answers(tokenizer: Any) -> Any:
    """Return the tokenizer, or a copy of it with which generation also stops where the chat template ends an answer."""
    end = missing_end(tokenizer)
    if end is None:
        return tokenizer
    stopping = copy.copy(tokenizer)
    stopping.eos_token_ids = {*tokenizer.eos_token_ids, tokenizer.convert_tokens_to_ids(end)}
    return stopping


def note_on_ends(tokenizer: Any) -> list[str]:
    """Return a sentence for the user where generation does not stop at the template's end of an answer."""
    end = missing_end(tokenizer)
    if end is None:
        return []
    names = " and ".join(map(repr, ends(tokenizer))) or "no token"
    return [
        f"The chat template ends an answer with {end!r}, and the model's config stops generation at {names} alone. "
        f"Samples and `deltatune generate` stop at {end!r}, too; for other programs, give deltatune merge or export "
        f"--to merged --extra-eos-token '{end}', or mlx_lm.generate --extra-eos-token '{end}'."
    ]


class AnswerParser:
    """Turns the text of an answer, asked for with these options, into the message that the chat template would write
    so.

    A template opens reasoning itself or leaves that to the model, and writes the reasoning of earlier answers or drops
    it. So a history holds reasoning and content apart, each without the texts that the template writes around it.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None):
        # Tools are no variable: the texts around an answer are the same without them.
        renderer = Renderer(tokenizer, {name: value for name, value in (options or {}).items() if name != "tools"})

        def asked(messages: Messages) -> str:
            return renderer.text(messages, options={"add_generation_prompt": True})

        self._prompt = behind_the_question(asked) or ""
        self._plain = around_content(renderer.text)
        written = ((key, around_reasoning(renderer.text, key)) for key in REASONING)
        reasoning = next((pair for pair in written if pair[1] is not None), (None, None))
        self._key = reasoning[0]
        self._around = reasoning[1] or ("", "")
        # Reasoning that the prompt opens and the template has no key for stays in the content, opened and closed.
        self._start = self._end = ""
        if self._key is None and tokenizer.has_thinking and self._prompt.rstrip().endswith(tokenizer.think_start):
            self._start = self._prompt[self._prompt.rindex(tokenizer.think_start) :]
            self._end = tokenizer.think_end

    def message(self, text: str) -> dict[str, Any]:
        """Return the message of an answer; an answer that was cut short within its reasoning has no content."""
        said = self._prompt + text
        opening, between = self._around
        if self._key is not None and said.startswith(opening.rstrip()):
            reasoning, content = self._split(_without_space(said, opening), between)
            return _message(content, {self._key: reasoning} if reasoning.strip() else {})
        if self._plain and not self._start and said.startswith(self._plain.rstrip()):
            return _message(_without_space(said, self._plain))
        return _message(self._start + text + ("" if self._end in text else self._end))

    def _split(self, text: str, between: str) -> tuple[str, str]:
        before, mark, behind = text.partition(between.strip())
        if not mark:
            return text, ""
        reasoning = before.removesuffix(between[: len(between) - len(between.lstrip())])
        if opening := self._around[0].removeprefix(self._prompt):
            # gpt-oss may reason in several messages, which its template takes for one.
            again = between.removesuffix(self._plain.removeprefix(self._prompt)) + opening
            reasoning = reasoning.replace(again, "\n\n")
        return reasoning, _without_space(mark + behind, between.lstrip())


def _without_space(text: str, opening: str) -> str:
    """Return a text without its opening; the text may lack some of the white space at the opening's end."""
    space = opening[len(opening.rstrip()) :]
    behind = text.removeprefix(opening.rstrip())
    return behind[in_common(behind, space) :]


def _message(content: str, reasoning: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {"role": "assistant", **(reasoning or {}), "content": content}
