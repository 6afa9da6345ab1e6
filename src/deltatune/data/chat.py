"""Conversations to tokens through the model's chat template, and the spans of tokens that assistant turns own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np

from ..errors import UserError

ASSISTANT = "assistant"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN_TOKENS = 6

Messages = list[dict[str, Any]]


def tokenize_chat(
    tokenizer: Any, messages: Messages, tools: list[Any] | None, *, completions_only: bool, source: str
) -> tuple[list[int], np.ndarray]:
    """Token ids of the conversation, and bool [N]: which of them count in the loss.

    Every token counts unless `completions_only`; then those of every assistant message do, save the ones with
    `"weight": 0`. A turn starts after the prompt that generation would be given there and runs to the end of what the
    template writes for it. Templates with `{% generation %}` blocks say themselves what counts.

    UserError, with `source`, where the template refuses the conversation or renders nothing, and where a turn's prompt
    is not a token prefix of the whole: a template that rewrites history would train on what is never generated.
    """
    whole = _render(tokenizer, messages, tools, source)
    if not whole:
        raise UserError(f"{source}: empty after the chat template; give it messages with content.")
    if not completions_only:
        return whole, np.ones(len(whole), bool)
    turns = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    counted = [index for index in turns if _weight(messages[index], index, source)]
    if turns == counted and _says_what_counts(tokenizer, tools):
        return whole, _template_mask(tokenizer, messages, tools, whole, source)
    targets = np.zeros(len(whole), bool)
    for index in counted:
        start, end = _span(tokenizer, messages, tools, index, whole, source)
        targets[start:end] = True
    return whole, targets


def _weight(message: dict[str, Any], index: int, source: str) -> bool:
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        raise UserError(f'{source}: message {index + 1}: expected "weight" 0 or 1, got {weight!r}.')
    return weight is None or bool(weight)


def _render(tokenizer: Any, messages: Messages, tools: list[Any] | None, source: str, **options: Any) -> Any:
    if not tokenizer.has_chat_template:
        raise UserError(
            f"{source}: the model's tokenizer has no chat template, which prompt/completion and chat lines need; "
            'use an instruction-tuned model, or lines of the form {"text": ...}.'
        )
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **options)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"{source}: the model's chat template refuses this conversation: {error}") from error


def _says_what_counts(tokenizer: Any, tools: list[Any] | None) -> bool:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = tokenizer.get_chat_template(tools=tools)
    return template is not None and _GENERATION_TAG.search(template) is not None


def _template_mask(
    tokenizer: Any, messages: Messages, tools: list[Any] | None, whole: list[int], source: str
) -> np.ndarray:
    # mlx-lm's wrapper drops the mask, so its Hugging Face tokenizer is asked, with the options the wrapper adds.
    encoded = tokenizer._tokenizer.apply_chat_template(
        messages,
        tools=tools,
        return_dict=True,
        return_assistant_tokens_mask=True,
        enable_thinking=tokenizer.has_thinking,
    )
    if encoded["input_ids"] != whole:
        raise UserError(f"{source}: the chat template's assistant mask belongs to other tokens; use --no-mask-prompt.")
    return np.array(encoded["assistant_masks"], bool)


def _span(
    tokenizer: Any, messages: Messages, tools: list[Any] | None, index: int, whole: list[int], source: str
) -> tuple[int, int]:
    """First and past-the-last token of assistant message `index` in `whole`."""
    where = f"{source}: message {index + 1}"
    if index == 0:
        raise UserError(
            f"{where}: the conversation begins with an assistant turn, so there is no prompt to leave out; put a user "
            f"message before it. {_REMEDY}"
        )
    asked = messages[:index]
    prompt = _render(tokenizer, asked, tools, source, add_generation_prompt=True)
    if _common(prompt, whole) < len(prompt):
        # An answer without reasoning follows the prompt that a template writes when thinking is switched off.
        plain = _render(tokenizer, asked, tools, source, add_generation_prompt=True, enable_thinking=False)
        if _common(plain, whole) < len(plain):
            raise UserError(f"{where}: {_difference(tokenizer, prompt, whole)} {_REMEDY}")
        prompt = plain
    if index == len(messages) - 1:
        return len(prompt), len(whole)
    alone = _render(tokenizer, messages[: index + 1], tools, source)
    end = _common(alone, whole)
    # Some templates close a conversation with a token of their own; anything else left over is a rewritten turn.
    closing = set(tokenizer.all_special_ids) | set(tokenizer.eos_token_ids)
    if end <= len(prompt) or not closing.issuperset(alone[end:]):
        raise UserError(f"{where}: {_difference(tokenizer, alone, whole)} {_REMEDY}")
    return len(prompt), end


_REMEDY = (
    'Or put "weight": 0 on this message to leave it out of the loss, or use --no-mask-prompt to train on every token.'
)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(np.asarray(left[:length]) != np.asarray(right[:length]))
    return int(differs[0]) if len(differs) else length


def _difference(tokenizer: Any, prompt: list[int], whole: list[int]) -> str:
    at = _common(prompt, whole)
    before, after = (tokenizer.decode(ids[max(at - 1, 0) : at + _SHOWN_TOKENS]) for ids in (prompt, whole))
    if tokenizer.decode(whole).startswith(tokenizer.decode(prompt)):
        return (
            f"the start of this answer merges into one token with the end of its prompt ({before!r} became {after!r}), "
            "so the prompt's tokens are not those it is generated from; remove white space at the answer's start."
        )
    return (
        "the chat template writes the conversation up to here differently once the rest follows "
        f"({before!r} became {after!r}; thinking templates do this to earlier turns), so this turn would be trained on "
        "in a context from which it is never generated. Give the conversation up to this turn a line of its own."
    )
