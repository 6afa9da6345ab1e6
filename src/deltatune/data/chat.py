"""Tokenises conversations through the model's chat template, and finds the tokens that belong to assistant turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np

from ..errors import UserError

ASSISTANT = "assistant"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# How many tokens a message quotes from the place where two renderings differ.
_SHOWN_TOKENS = 6

Messages = list[dict[str, Any]]


def tokenize_chat(
    tokenizer: Any, messages: Messages, tools: list[Any] | None, *, completions_only: bool, source: str
) -> tuple[list[int], np.ndarray]:
    """Tokenise a conversation and mark the tokens that count in the loss.

    An assistant turn starts after the prompt from which it would be generated, and runs to the end of what the template
    writes for it. A template with `{% generation %}` blocks marks by itself what counts, unless a turn has weight 0.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        messages: the conversation; a message with `"weight": 0` does not count.
        tools: the tools that the template describes to the model.
        completions_only: whether only assistant turns count, rather than every token.
        source: where the conversation came from, for messages to the user.

    Returns:
        The token ids, and bool [N], which of them count.

    Raises:
        UserError: the template refuses the conversation or renders nothing, or the prompt of a turn is not a prefix of
            the conversation's tokens. A template that rewrites earlier turns would train on what is never generated.
    """
    tokens = _render(tokenizer, messages, tools, source)
    if not tokens:
        raise UserError(f"{source}: empty after the chat template; give the conversation messages with content.")
    if not completions_only:
        return tokens, np.ones(len(tokens), bool)
    turns = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    counted = [index for index in turns if _weight(messages[index], index, source)]
    if turns == counted and _has_generation_blocks(tokenizer, tools):
        return tokens, _template_mask(tokenizer, messages, tools, tokens, source)
    targets = np.zeros(len(tokens), bool)
    for index in counted:
        start, end = _turn_span(tokenizer, messages, tools, index, tokens, source)
        targets[start:end] = True
    return tokens, targets


def _weight(message: dict[str, Any], index: int, source: str) -> bool:
    """Whether a message counts in the loss: its "weight" is 1 or not given."""
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        raise UserError(f'{source}: message {index + 1}: expected "weight" 0 or 1, got {weight!r}.')
    return weight is None or bool(weight)


def _render(tokenizer: Any, messages: Messages, tools: list[Any] | None, source: str, **options: Any) -> Any:
    """Return the tokens that the chat template gives for a conversation."""
    if not tokenizer.has_chat_template:
        raise UserError(
            f"{source}: the model's tokenizer has no chat template, which prompt/completion and chat lines need; "
            'use an instruction-tuned model, or lines of the form {"text": ...}.'
        )
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **options)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"{source}: the model's chat template refuses this conversation: {error}") from error


def _has_generation_blocks(tokenizer: Any, tools: list[Any] | None) -> bool:
    """Whether the chat template marks the generated text with `{% generation %}` blocks."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = tokenizer.get_chat_template(tools=tools)
    return template is not None and _GENERATION_TAG.search(template) is not None


def _template_mask(
    tokenizer: Any, messages: Messages, tools: list[Any] | None, tokens: list[int], source: str
) -> np.ndarray:
    """Return the mask of the template's `{% generation %}` blocks, bool [N]."""
    # mlx-lm's wrapper drops the mask, so this calls the Hugging Face tokenizer with the options that the wrapper adds.
    encoded = tokenizer._tokenizer.apply_chat_template(
        messages,
        tools=tools,
        return_dict=True,
        return_assistant_tokens_mask=True,
        enable_thinking=tokenizer.has_thinking,
    )
    if encoded["input_ids"] != tokens:
        raise UserError(f"{source}: the chat template's assistant mask does not fit its tokens; use --no-mask-prompt.")
    return np.array(encoded["assistant_masks"], bool)


def _turn_span(
    tokenizer: Any, messages: Messages, tools: list[Any] | None, index: int, tokens: list[int], source: str
) -> tuple[int, int]:
    """Return where in `tokens` the assistant message `index` starts, and where it ends (exclusive)."""
    where = f"{source}: message {index + 1}"
    if index == 0:
        raise UserError(
            f"{where}: the conversation begins with an assistant turn, so there is no prompt to leave out; put a user "
            f"message before it. {_REMEDY}"
        )
    before = messages[:index]
    prompt = _render(tokenizer, before, tools, source, add_generation_prompt=True)
    if _common_prefix(prompt, tokens) < len(prompt):
        # An answer without reasoning follows the prompt that a template writes when thinking is switched off.
        plain = _render(tokenizer, before, tools, source, add_generation_prompt=True, enable_thinking=False)
        if _common_prefix(plain, tokens) < len(plain):
            raise UserError(f"{where}: {_difference(tokenizer, prompt, tokens)} {_REMEDY}")
        prompt = plain
    if index == len(messages) - 1:
        return len(prompt), len(tokens)
    up_to_turn = _render(tokenizer, messages[: index + 1], tools, source)
    end = _common_prefix(up_to_turn, tokens)
    # Some templates end a conversation with a special token; any other difference means that the turn was rewritten.
    closing = set(tokenizer.all_special_ids) | set(tokenizer.eos_token_ids)
    if end <= len(prompt) or not closing.issuperset(up_to_turn[end:]):
        raise UserError(f"{where}: {_difference(tokenizer, up_to_turn, tokens)} {_REMEDY}")
    return len(prompt), end


_REMEDY = (
    'Or put "weight": 0 on this message to leave it out of the loss, or use --no-mask-prompt to train on every token.'
)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(left), len(right))
    differences = np.flatnonzero(np.asarray(left[:length]) != np.asarray(right[:length]))
    return int(differences[0]) if len(differences) else length


def _difference(tokenizer: Any, prompt: list[int], tokens: list[int]) -> str:
    """Explain to the user why `prompt` is not a prefix of the conversation's tokens."""
    at = _common_prefix(prompt, tokens)
    before, after = (tokenizer.decode(ids[max(at - 1, 0) : at + _SHOWN_TOKENS]) for ids in (prompt, tokens))
    if tokenizer.decode(tokens).startswith(tokenizer.decode(prompt)):
        return (
            f"the start of this answer merges into one token with the end of its prompt ({before!r} became {after!r}), "
            "so the answer is not generated from these prompt tokens; remove white space at the start of the answer."
        )
    return (
        "the chat template writes the conversation up to here differently once the rest follows "
        f"({before!r} became {after!r}; thinking templates do this to earlier turns), so this turn would be trained on "
        "in a context from which it is never generated. Put the conversation up to this turn on a line of its own."
    )
