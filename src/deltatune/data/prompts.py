"""Turns prompts into tokens through the chat template of a model: those of a user, and those of rows of data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import UserError
from ..options.config import TrainConfig
from .chats.rendering import Renderer
from .chats.unwritten import note
from .example import Example
from .rows.row_formats import (
    ASSISTANT,
    Features,
    Messages,
    RowFormats,
    join_text_parts,
    messages_in_text,
    template_options_of,
    tools_of,
)
from .text import MediaPlacer, PlacedMedium, check_template
from .vision.messages import media_kind


@dataclass(frozen=True)
class Question:
    """A user's question. Without a chat template, the prompt is the whole text.

    `prefill_response` is the beginning of the answer, which the model then continues. Before the prompt stand so many
    images, for each of which the template writes one token, and the texts that stand for videos.
    """

    prompt: str
    system_prompt: str | None = None
    prefill_response: str | None = None
    images: int = 0
    videos: Sequence[str] = ()

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation that asks it; an answer that has begun comes last."""
        content: Any = self.prompt
        if self.images or self.videos:
            before = [{"type": "image"}] * self.images + [{"type": "text", "text": text} for text in self.videos]
            content = [*before, {"type": "text", "text": self.prompt}]
        messages = [{"role": "user", "content": content}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        if self.prefill_response is not None:
            messages.append({"role": "assistant", "content": str(self.prefill_response)})
        return messages


def prompt_tokens(
    tokenizer: Any,
    question: Question,
    *,
    chat_template: bool = True,
    template_options: Mapping[str, Any] | None = None,
    refused: str = (
        "change --prompt, --system-prompt, --prefill-response or --chat-template-config, or give --ignore-chat-template"
    ),
) -> list[int]:
    """Turn a question into token ids, through the tokenizer's chat template if it has one and `chat_template` is true.

    A UserError, with the remedy `refused`, says that the template refuses the prompt or an option, or that there is
    none to place an option's text.
    """
    if not (chat_template and tokenizer.has_chat_template):
        flags = {"--system-prompt": question.system_prompt, "--prefill-response": question.prefill_response}
        for flag, text in flags.items():
            if text is not None:
                raise UserError(f"{flag}: without a chat template, the prompt is the whole text; write it there.")
        return text_tokens(tokenizer, question.prompt)
    prefilled = question.prefill_response is not None
    text = conversation_text(tokenizer, question.messages(), refused, template_options, prefilled=prefilled)
    return tokenizer.encode(text, add_special_tokens=False)


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """Turn a text for the model to continue into tokens, without the end that some tokenizers add.

    The token that begins a text is added as the tokenizer does it, unless the text has it already.
    """
    first = tokenizer.bos_token
    if first and text.startswith(first):
        return list(tokenizer.encode(text, add_special_tokens=False))
    tokens = list(tokenizer.encode(text))
    behind = _added_behind(tokenizer)
    return tokens[: len(tokens) - len(behind)] if behind and tokens[-len(behind) :] == behind else tokens


def _added_behind(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer adds behind every text."""
    letter = "a"
    plain = list(tokenizer.encode(letter, add_special_tokens=False))
    added = list(tokenizer.encode(letter))
    ends = (at + len(plain) for at in range(len(added)) if added[at : at + len(plain)] == plain)
    return added[next(ends, len(added)) :]


def conversation_text(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    remedy: str,
    template_options: Mapping[str, Any] | None = None,
    *,
    prefilled: bool = False,
) -> str:
    """Write a conversation that the model is to answer with the chat template, within rendering.LIMITS.

    Under `tools`, `template_options` hold the tools that the template describes to the model. With `prefilled` the last
    message is the beginning of the answer. A UserError that ends with the remedy says that the template refuses the
    conversation or an option, or reaches a limit.
    """
    options = {"continue_final_message": prefilled, "add_generation_prompt": not prefilled, **(template_options or {})}
    try:
        return Renderer(tokenizer).text(messages, options.pop("tools", None), options)
    except UserError as error:
        raise UserError(f"{str(error).removesuffix('.')}; {remedy}.") from None


# The column under which rewards find the answer that a row has behind its prompt, unless the row has one of this name.
ANSWER = "answer"


@dataclass(frozen=True, slots=True, eq=False)
class PromptExample(Example):
    """The prompt of a row, behind which answers of up to `most` tokens are sampled. No token of it counts in the loss.

    `question` is the prompt as the data have it, a text or messages, and `columns` the other columns of the row, which
    rewards read. A `plain` prompt is continued as it stands.
    """

    question: str | Messages = ""
    columns: dict[str, Any] = field(default_factory=dict)
    most: int = 0
    plain: bool = False

    @property
    def positions(self) -> int:
        """The positions of the prompt with the longest answer."""
        return len(self.tokens) - 1 + self.most

    @property
    def beside(self) -> bytes:
        """The content of the example beside its tokens."""
        return json.dumps([self.question, self.columns], sort_keys=True, default=str).encode()


def messages_to_answer(row: Any, source: str, features: Features) -> tuple[Messages, Messages] | None:
    """Return the messages of a row before its last answer, and those from there on; None for plain text.

    A row without a known format is refused by a UserError that names `source`.
    """
    alone = isinstance(row, Mapping) and row.get(features.completion) is None
    question = messages_in_text(row.get(features.prompt)) if alone else None
    if isinstance(question, str) and question.strip():
        return [{"role": "user", "content": question}], []
    formats = RowFormats(Features(chat=features.prompt) if isinstance(question, list) else features)
    messages = formats.messages(row, source)
    if messages is None:
        return None
    asked = len(messages)
    while asked and messages[asked - 1]["role"] == ASSISTANT:
        asked -= 1
    return messages[:asked], messages[asked:]


class PromptWriter:
    """Writes messages of rows as prompts, and counts the parts that the chat template leaves out (`unwritten`).

    `options` are variables of the template, which those of a row override.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None):
        self.tokenizer = tokenizer
        self.unwritten = Counter[str]()
        self._renderer = Renderer(tokenizer, options)

    def tokens(self, messages: Messages, row: Mapping[str, Any], source: str) -> list[int]:
        """Return the tokens of a row's messages that are to be answered.

        A UserError says that there are none, that the template refuses them, or that there is no template.
        """
        if not messages:
            raise UserError(f"{source}: no message before the answer; expected one to answer.")
        if not self.tokenizer.has_chat_template:
            raise UserError(
                f"{source}: the model's tokenizer has no chat template, which a prompt or chat needs; give rows of "
                'the form {"text": ...}.'
            )
        tools = tools_of(row, source)
        check_template(messages, self._renderer.template(tools), source)
        try:
            text, lost = self._renderer.prompt(messages, tools, template_options_of(row, source))
        except UserError as error:
            raise UserError(f"{str(error).removesuffix('.')}; change {source}.") from None
        self.unwritten.update(kind for kind, _ in lost)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def notes(self, name: str) -> list[str]:
        """Return a sentence on each kind of parts that the template leaves out of the rows of a table."""
        return [f"{name}: {note(*counted)}" for counted in self.unwritten.items()]


def prompt_example(
    row: Any, source: str, features: Features, writer: PromptWriter, config: TrainConfig, placer: MediaPlacer | None
) -> PromptExample:
    """Return the prompt of a row with its other columns; `placer` puts images and videos into it.

    A UserError refuses an unknown format or role, a prompt of no token, and images without a placer.
    """
    parts = messages_to_answer(row, source, features)
    media: Sequence[PlacedMedium] = ()
    columns = {name: value for name, value in row.items() if name not in (features.prompt, features.chat)}
    if parts is None:
        text = RowFormats(features).text(row, source).text
        question: str | Messages = text
        tokens = text_tokens(writer.tokenizer, text)
    else:
        messages, answers = parts
        if placer is not None:
            messages, media = placer.place(row, messages, source)
        elif kind := media_kind(row, messages):
            raise UserError(f"{source}: this row has {kind}s, and the model no vision tower; remove the row.")
        else:
            messages = join_text_parts(messages, source)
        tokens = writer.tokens(messages, row, source)
        question = messages_in_text(row.get(features.prompt))
        question = question if isinstance(question, str) else messages
        if answers and answers[-1].get("content") is not None:
            columns.setdefault(ANSWER, answers[-1]["content"])
    if not tokens:
        raise UserError(f"{source}: no token is left of the prompt; remove this row.")
    targets = np.zeros(len(tokens), bool)
    example = PromptExample(
        np.array(tokens, np.int32),
        targets,
        source,
        question=question,
        columns=columns,
        most=config.max_completion_length,
        plain=parts is None,
    )
    placed: Any = example if placer is None else placer.with_pictures(example, media)
    return placed
