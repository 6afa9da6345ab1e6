"""Turns prompts into tokens through the chat template of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from .chats.rendering import Renderer


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
    return conversation_tokens(tokenizer, question.messages(), refused, template_options, prefilled=prefilled)


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


def conversation_tokens(tokenizer: Any, *conversation: Any, **options: Any) -> list[int]:
    """Turn a conversation that the model is to answer into tokens, with the arguments of conversation_text."""
    return tokenizer.encode(conversation_text(tokenizer, *conversation, **options), add_special_tokens=False)
