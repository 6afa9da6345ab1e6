"""The names that other trainers have for our options, from other_names.yaml, so that a message can name ours."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

# The options that stand under lora_parameters in a file, and all that have no flag.
_OF_ADAPTERS = ("rank", "alpha", "scale", "dropout", "keys", "exclude", "rslora")
_IN_FILES = ("hf_dataset", "lora_parameters", "optimizer_config", "text_feature", *_OF_ADAPTERS)


@cache
def table(part: str) -> dict[str, list[str]]:
    """Return a part of the file: `options`, `of_commands`, `answers` or `commands`, each with its names elsewhere."""
    import yaml

    parts: Any = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {ours: names.split() for ours, names in parts[part].items()}


def answer_to(word: str) -> str | None:
    """Return how an option or choice that deltatune has not is asked for here, or None."""
    return next((answer for answer, names in table("answers").items() if plain(word) in names), None)


def option_meant(word: str, known: list[str]) -> str | None:
    """Return the one of the known keys or flags that `word`, an unknown key or flag, names elsewhere, or None."""
    if "selftest" in known:
        return next((command for command, names in table("commands").items() if word in names), None)
    name = plain(word)
    by_option = (*table("of_commands").items(), *table("options").items(), (name, [name]))
    for option in (option for option, names in by_option if name in names):
        if option in _OF_ADAPTERS and "lora_parameters" in known:
            return f"lora_parameters: {{{option}: ...}}"
        as_typed = "--" + option.replace("_", "-") if word.startswith("-") else option
        if as_typed in known:
            return as_typed
        if option in _IN_FILES and "--iters" in known:
            inside = f"lora_parameters: {{{option}: ...}}" if option in _OF_ADAPTERS else f"{option}: ..."
            return f"{inside} in a file, -c FILE"
    return None


def plain(word: str) -> str:
    """Return the name of a flag or key without dashes and value."""
    return word.split("=")[0].lstrip("-").replace("-", "_")
