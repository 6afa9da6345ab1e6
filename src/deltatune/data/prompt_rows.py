"""Reads the prompt of a row of data, which a model answers: for samples, and for rollouts with the row's columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import UserError
from ..options.config import TrainConfig
from .chats.rendering import Renderer
from .chats.unwritten import UnwrittenParts
from .example import Example
from .prompts import conversation_tokens, text_tokens
from .rows.row_formats import (
    ASSISTANT,
    Conversation,
    Features,
    Messages,
    RowFormats,
    join_text_parts,
    messages_in_text,
    template_options_of,
    tools_of,
)
from .text import MediaPlacer, PlacedMedium, check_calls, check_roles
from .vision.messages import media_kind

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


def tokens_to_answer(tokenizer: Any, messages: Messages, options: Mapping[str, Any], source: str) -> list[int]:
    """Turn the messages of a row into tokens; UserError without a message or template, or where it refuses them."""
    if not messages:
        raise UserError(f"{source}: no message before the answer; expected one to answer.")
    if not tokenizer.has_chat_template:
        raise UserError(
            f"{source}: the model's tokenizer has no chat template, which a prompt or chat needs; give rows of "
            'the form {"text": ...}.'
        )
    return conversation_tokens(tokenizer, messages, f"change {source}", options)


def prompt_example(
    row: Any,
    source: str,
    features: Features,
    renderer: Renderer,
    config: TrainConfig,
    unwritten: UnwrittenParts,
    placer: MediaPlacer | None = None,
) -> PromptExample:
    """Return the prompt of a row with its other columns; parts that the chat template leaves out are counted.

    `placer` puts images and videos into it. UserError for an unknown format or role, no token, or images without it.
    """
    parts = messages_to_answer(row, source, features)
    media: Sequence[PlacedMedium] = ()
    columns = {name: value for name, value in row.items() if name not in (features.prompt, features.chat)}
    if parts is None:
        question: str | Messages = RowFormats(features).text(row, source).text
        tokens = text_tokens(renderer.tokenizer, question)  # type: ignore[arg-type]
    else:
        messages, answers = parts
        options = template_options_of(row, source)
        tools = tools_of(row, source)
        if placer is None:
            if kind := media_kind(row, messages):
                raise UserError(f"{source}: this row has {kind}s, and the model no vision tower; remove the row.")
            messages = join_text_parts(messages, source)
        else:
            messages, media = placer.place(row, messages, source)  # type: ignore[assignment]
        asked = {**(config.chat_template_config or {}), **options, "tools": tools}
        tokens = tokens_to_answer(renderer.tokenizer, messages, asked, source)
        template = renderer.template(tools)
        check_roles(messages, template, source)
        check_calls(messages, template, source)
        unwritten.count_prompt(
            Conversation(messages, tools, [], False, source, options, media),
            lambda spoken, tools: renderer.text(spoken, tools, {**options, "add_generation_prompt": True}),
        )
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
