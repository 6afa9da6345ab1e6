"""Parses a generated answer into the reasoning and the content of a message, as the model's template tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .rendering import Renderer
from .template_probes import REASONING, Messages, around_content, around_reasoning, behind_the_question, in_common


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
        self._key: str | None = None
        self._around = ("", "")
        for key, around in written:
            if around is not None:
                self._key = key
                self._around = around
                break
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
