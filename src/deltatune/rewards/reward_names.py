"""Reads the texts that name reward functions: FILE.py:FUNCTION, a built-in name, command:PROGRAM."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from ..machine.environment import expanded
from ..options.values import nearest, short
from .built_in import BUILT_IN, EXTRAS, built_in


def named(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the arguments of RewardChild for each function that a text of reward_funcs names.

    A text that names none, a missing file or program, or a package that is not installed is a UserError.
    """
    head, _, behind = text.partition(":")
    if head in BUILT_IN:
        _check(head, behind)
        yield (head, head, head, behind) if head != "command" else (_stem(behind), behind, head, behind)
        return
    path, _, names = text.rpartition(":")
    functions = [name.strip() for name in names.split(",") if name.strip()]
    if not path.endswith(".py") or not functions:
        forms = f"FILE.py:FUNCTION, command:PROGRAM, or one of {', '.join(BUILT_IN)}"
        raise UserError(f"reward_funcs: expected {forms}, got {short(text)}{nearest(head, list(BUILT_IN))}.")
    path = str(expanded(path))
    if not Path(path).is_file():
        raise UserError(f"reward_funcs: {path}: there is no such file; give the path of a file of Python.")
    for name in functions:
        yield name, f"{name} ({path})", path, name


def _stem(command: str) -> str:
    return Path(shlex.split(command)[0]).stem


def _check(name: str, argument: str) -> None:
    """Refuse a built-in function with a text behind its name that it cannot take, or without its package."""
    if name in EXTRAS and importlib.util.find_spec(name.replace("-", "_")) is None:
        raise UserError(f"reward_funcs: {name}: its package is not installed: pip install '{EXTRAS[name]}'.")
    try:
        function = built_in(name, argument)
        if name == "command" and shutil.which(shlex.split(argument)[0]) is None:
            raise ValueError(f"{argument}: there is no such program; give its path, and let chmod +x make it one")
        if name != "command" and argument:
            function([])
    except (ValueError, re.error) as error:
        raise UserError(f"reward_funcs: {name}: {error}.") from error
