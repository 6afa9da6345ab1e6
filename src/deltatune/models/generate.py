"""Generates text with mlx-lm, and turns prompts into tokens through the chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler

from ..errors import UserError, reason
from ..machine.compiling import without_kernels
from ..patches import patched
from .load import Loaded

# A template is a program of the model's: what it does with a message or an option of a wrong type is any of these.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How each next token is chosen. The options mean what they mean in `mlx_lm.generate`.

    Attributes:
        temp: The temperature. 0 takes the likeliest token, whatever the other options say.
        top_p: Only the likeliest tokens whose probabilities add up to this are drawn from.
        min_p: Only tokens at least this likely, relative to the likeliest, are drawn from.
        top_k: Only this many of the likeliest tokens are drawn from. 0 means all.
    """

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0


def prompt_tokens(
    tokenizer: Any,
    prompt: str,
    *,
    system_prompt: str | None = None,
    prefill_response: str | None = None,
    chat_template: bool = True,
    template_options: dict[str, Any] | None = None,
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
        UserError: The chat template refuses the prompt or an option.
    """
    if not (chat_template and tokenizer.has_chat_template):
        return tokenizer.encode(prompt)
    messages = _messages(prompt, system_prompt, images, videos)
    prefilled = prefill_response is not None
    if prefilled:
        messages.append({"role": "assistant", "content": str(prefill_response)})
    options = {"continue_final_message": prefilled, "add_generation_prompt": not prefilled, **(template_options or {})}
    return conversation_tokens(tokenizer, messages, refused, **options)


def conversation_text(tokenizer: Any, messages: list[dict[str, Any]], remedy: str, **options: Any) -> str:
    """Write a conversation with the chat template.

    Args:
        tokenizer: mlx-lm's wrapper of a tokenizer that has a chat template.
        messages: The messages, each with its role.
        remedy: What the user can do if the template refuses them.
        options: Variables for the template.

    Raises:
        UserError: The chat template refuses the conversation or an option.
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except _TEMPLATE_ERRORS as error:
        raise UserError(f"the model's chat template refuses the prompt: {reason(error)}; {remedy}.") from error


def conversation_tokens(tokenizer: Any, messages: list[dict[str, Any]], remedy: str, **options: Any) -> list[int]:
    """Turn a conversation into tokens, with the arguments of conversation_text."""
    return tokenizer.encode(conversation_text(tokenizer, messages, remedy, **options), add_special_tokens=False)


def _messages(prompt: str, system_prompt: str | None, images: int, videos: Sequence[str]) -> list[dict[str, Any]]:
    """The conversation that asks `prompt`, with images and videos before it."""
    content: Any = prompt
    if images or videos:
        before = [{"type": "image"}] * images + [{"type": "text", "text": text} for text in videos]
        content = [*before, {"type": "text", "text": prompt}]
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": content}]


def stream(loaded: Loaded, prompt: list[int], max_tokens: int, sampling: Sampling) -> Iterator[Any]:
    """Generate an answer piece by piece.

    Args:
        loaded: The model and its tokenizer.
        prompt: The prompt's tokens.
        max_tokens: The largest number of tokens in the answer.
        sampling: How each token is chosen.

    Yields:
        mlx-lm's responses: each has the `text` of a piece; the last one also has speeds, token counts and
        `finish_reason`.
    """
    sampler = make_sampler(temp=sampling.temp, top_p=sampling.top_p, min_p=sampling.min_p, top_k=sampling.top_k)
    # Building kernels would take longer than an answer takes without them; on CUDA every process builds them anew.
    with without_kernels(), patched():
        yield from stream_generate(loaded.model, loaded.tokenizer, prompt, max_tokens=max_tokens, sampler=sampler)
