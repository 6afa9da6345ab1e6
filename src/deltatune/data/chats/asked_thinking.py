"""Chooses the enable_thinking with which a trained model is asked: that of the prompts before its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...options.chat_template import THINKING, written_options


def asked_options(
    variables: Mapping[str, Any] | None, tokenizer: Any, prompts: Counter[bool]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the variables of the chat template with which samples and `generate` ask.

    Args:
        variables: The variables that the user gave, or None.
        tokenizer: mlx-lm's TokenizerWrapper.
        prompts: How many answers follow a prompt with each value of enable_thinking.

    Returns:
        The variables, None where mlx-lm's own are right; and sentences for the user.
    """
    options = None if variables is None else dict(variables)
    asked = (options or {}).get(THINKING, tokenizer.has_thinking)
    others = prompts[not asked]
    if not others:
        return options, []
    flag = written_options({THINKING: not asked})
    if prompts[asked] or THINKING in (options or {}):
        return options, [
            f"{others:,} of {prompts.total():,} answers follow the prompt with {THINKING} {_word(not asked)}; samples "
            f"and `deltatune generate` ask with {_word(asked)}. {flag} asks as those answers were learnt."
        ]
    return {**(options or {}), THINKING: not asked}, [
        f"The answers follow the prompt with {THINKING} {_word(not asked)}, so samples and `deltatune generate` ask "
        f"with it, as {flag} does elsewhere."
    ]


def _word(value: bool) -> str:
    return "true" if value else "false"
