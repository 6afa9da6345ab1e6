"""Finds the token with which a chat template ends an answer and at which the model's generation would not stop."""

from __future__ import annotations

import copy
from typing import Any

from ...upstream import hugging_face_tokenizer
from .rendering import Renderer, special_tokens
from .template_probes import behind_the_last_answer, first_of


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


def note(tokenizer: Any) -> list[str]:
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
