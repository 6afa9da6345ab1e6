"""Checks the variables of a chat template that an option or a row of data sets, such as enable_thinking."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from .values import short

THINKING = "enable_thinking"
# Arguments of transformers' apply_chat_template that deltatune sets, or that would change its result.
_OWN = {
    "conversation", "tokenize", "add_generation_prompt", "continue_final_message", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "messages",
}  # fmt: skip
# Arguments that a single prompt may set, and rows of data have otherwise.
_OF_PROMPTS = {"tools", "chat_template"}


def checked_options(options: Any, where: str, *, prompt: bool = False) -> dict[str, Any]:
    """Return variables of a chat template, by name, after a check; one `prompt` may set tools and the template, too.

    A UserError refuses other things than a mapping, values that JSON lacks, and arguments that deltatune sets itself.
    """
    if not isinstance(options, Mapping):
        raise UserError(f"{where}: expected a JSON object, got {short(options)}.")
    names = [name for name in options if not isinstance(name, str)]
    if names:
        raise UserError(f"{where}: expected names of variables, got {short(names[0])}.")
    if refused := options.keys() & (_OWN if prompt else _OWN | _OF_PROMPTS):
        raise UserError(f"{where}: {min(refused)!r} is set by this command; leave it out.")
    if not isinstance(options.get(THINKING, True), bool):
        raise UserError(f"{where}: {THINKING}: expected true or false, got {short(options[THINKING])}.")
    try:
        json.dumps(options)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: expected values of JSON ({error}), got {short(dict(options))}.") from error
    return dict(options)


def parsed_options(text: str, where: str, *, prompt: bool = False) -> dict[str, Any]:
    """Return the variables that a JSON text holds, checked as by checked_options."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{where}: not JSON ({error}); give an object such as {{"{THINKING}": false}}.') from error
    return checked_options(options, where, prompt=prompt)


def written_options(options: Mapping[str, Any]) -> str:
    """Return variables as a flag to be pasted into a shell: --chat-template-config '{...}'."""
    return f"--chat-template-config {shlex.quote(json.dumps(dict(options)))}"
