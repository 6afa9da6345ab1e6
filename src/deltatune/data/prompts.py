"""Turns prompts into tokens through the chat template of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from .chats.rendering import Renderer


def prompt_tokens(
    tokenizer: Any,
    prompt: str,
    *,
    system_prompt: str | None = None,
    prefill_response: str | None = None,
    chat_template: bool = True,
    template_options: Mapping[str, Any] | None = None,
    images: int = 0,
    videos: Sequence[str] = (),
    refused: str = (
        "change --prompt, --system-prompt, --prefill-response or --chat-template-config, or give --ignore-chat-template"
    ),
) -> list[int]:
    """Turn a user's prompt into tokens, through the tokenizer's chat template if it has one.

    Args:
        tokenizer: mlx-lm's wrapper of the tokenizer.
        prompt: The user's message. Without a chat template it is the whole text.
        system_prompt: A system message that stands first.
        prefill_response: The beginning of the answer, which the model then continues.
        chat_template: False ignores the template.
        template_options: Further variables for the template.
        images: The number of images before the prompt. The template writes one image token for each.
        videos: For each video before the prompt, the text that stands for it.
        refused: What the user can do if the template refuses the prompt.

    Returns:
        The token ids.

    Raises:
        UserError: The chat template refuses the prompt or an option, or there is none to place an option's text.
    """
    if not (chat_template and tokenizer.has_chat_template):
        for flag, text in (("--system-prompt", system_prompt), ("--prefill-response", prefill_response)):
            if text is not None:
                raise UserError(f"{flag}: without a chat template, the prompt is the whole text; write it there.")
        return tokenizer.encode(prompt)
    messages = _messages(prompt, system_prompt, images, videos)
    prefilled = prefill_response is not None
    if prefilled:
        messages.append({"role": "assistant", "content": str(prefill_response)})
    return conversation_tokens(tokenizer, messages, refused, template_options, prefilled=prefilled)


def conversation_text(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    remedy: str,
    template_options: Mapping[str, Any] | None = None,
    *,
    prefilled: bool = False,
) -> str:
    """Write a conversation that the model is to answer with the chat template, within rendering.LIMITS.

    Args:
        tokenizer: mlx-lm's wrapper of a tokenizer that has a chat template.
        messages: The messages, each with its role.
        remedy: What the user can do if the template refuses them.
        template_options: Variables for the template. Under `tools` stand the tools that it describes to the model.
        prefilled: Whether the last message is the beginning of the answer, which the model then continues.

    Raises:
        UserError: If the chat template refuses the conversation or an option, or reaches a limit.
    """
    options = {"continue_final_message": prefilled, "add_generation_prompt": not prefilled, **(template_options or {})}
    try:
        return Renderer(tokenizer).text(messages, options.pop("tools", None), options)
    except UserError as error:
        raise UserError(f"{str(error).removesuffix('.')}; {remedy}.") from None


def conversation_tokens(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    remedy: str,
    template_options: Mapping[str, Any] | None = None,
    *,
    prefilled: bool = False,
) -> list[int]:
    """Turn a conversation that the model is to answer into tokens, with the arguments of conversation_text."""
    text = conversation_text(tokenizer, messages, remedy, template_options, prefilled=prefilled)
    return tokenizer.encode(text, add_special_tokens=False)


def _messages(prompt: str, system_prompt: str | None, images: int, videos: Sequence[str]) -> list[dict[str, Any]]:
    """The conversation that asks `prompt`, with images and videos before it."""
    content: Any = prompt
    if images or videos:
        before = [{"type": "image"}] * images + [{"type": "text", "text": text} for text in videos]
        content = [*before, {"type": "text", "text": prompt}]
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": content}]
