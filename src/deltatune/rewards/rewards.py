"""The rewards of a batch of completions under the contract of TRL, from processes with a deadline."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..errors import UserError
from ..machine.environment import expanded
from ..machine.wrapping import say
from ..options.config import TrainConfig
from ..options.values import nearest, short
from .built_in import BUILT_IN, EXTRAS, built_in, text_of
from .reward_child import RewardChild


def named(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the arguments of RewardChild for each function that a text of reward_funcs names.

    A text that names none, a missing file or program, or a package that is not installed is a UserError.
    """
    head, _, behind = text.partition(":")
    if head in BUILT_IN:
        _check(head, behind)
        shown = (Path(shlex.split(behind)[0]).stem, behind) if head == "command" else (head, head)
        yield *shown, head, behind
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


# How long a file may take to be imported.
_LOAD_SECONDS = 300.0
_LOOK_SECONDS = 0.05


class RewardError(UserError):
    """A reward function failed, and reward_errors asks to stop."""


class Rewards:
    """The reward functions of a run, each in a process of its own, loaded at once: one that cannot be is a UserError.

    `report` is called with texts for the user: failures that do not stop, and output of the functions. `names` differ
    from one another; `weights` are their factors in float64, [functions].
    """

    def __init__(self, config: TrainConfig, report: Callable[[str], object] = say):
        self._config = config
        self._report = report
        self._children = [RewardChild(*about) for text in config.reward_funcs for about in named(text)]
        self.names = _unlike([child.name for child in self._children])
        self.weights = np.array(config.reward_weights or [1] * len(self.names), np.float64)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            if not self.names:
                raise UserError("reward_funcs: expected a reward function, such as exact, and got none.")
            if len(self.weights) != len(self.names):
                raise UserError(
                    f"reward_weights: expected a number for each of {', '.join(self.names)}, got {len(self.weights)}."
                )
            self._load(lambda: None)
            stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        check: Callable[[], object] = lambda: None,
    ) -> np.ndarray:
        """Return the rewards of completions in float64, [functions, completions]; NaN stands for None.

        There is a prompt a completion: text, or a list of messages, as completions then are. `columns` are those of the
        data by name, a value a completion, with completion_ids, the tokens of each. `check` is called twenty times a
        second; an exception leaves the call. A function that raised, took too long, ended, or returned no rewards is a
        RewardError where reward_errors stops the run; one that asks for a column which the data lack, a UserError.
        """
        values = {**columns, "prompts": list(prompts), "completions": list(completions)}
        # A value that JSON lacks, such as a date in Parquet data, is handed over as text.
        request = json.dumps(values, default=str).encode()
        self._load(check)
        self._ask(request, self._children, self._config.reward_timeout, check, ("refused",))
        failures = [_failure(child, prompts) for child in self._children if "error" in child.reply]
        if failures and self._config.reward_errors == "stop":
            raise RewardError(
                "\n".join(failures) + "\nMend the function, or set reward_errors: none; such rewards are then None."
            )
        for failure in failures:
            self._report(f"{failure} The reward is None.")
        nothing = [None] * len(prompts)
        # NumPy makes NaN of None.
        return np.array([child.reply.get("rewards", nothing) for child in self._children], np.float64)

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.end()

    def _load(self, check: Callable[[], object]) -> None:
        """Load the functions of the processes that do not run."""
        children = [child for child in self._children if not child.runs]
        self._ask(b"", children, _LOAD_SECONDS, check, ("refused", "error"))

    def _ask(
        self,
        request: bytes,
        children: list[RewardChild],
        seconds: float,
        check: Callable[[], object],
        fatal: tuple[str, ...],
    ) -> None:
        """Send a request to processes and wait for their replies, of which some kinds are a UserError."""
        end = time.monotonic() + seconds
        try:
            for child in children:
                child.ask(request)
            while waiting := [child for child in children if child.waits]:
                check()
                connection.wait([pipe for child in waiting for pipe in child.pipes], _LOOK_SECONDS)
                for child in waiting:
                    child.read()
                    if child.waits and time.monotonic() > end:
                        child.fail(f"took longer than {seconds:g} seconds")
        finally:
            for child in children:
                # A late reply would answer the next request.
                if child.waits:
                    child.end()
                if printed := child.printed():
                    self._report(f"Output of the reward {child.label}:\n{printed}")
        replies = [(child.label, child.reply) for child in children]
        refused = [f"reward {label}: {reply[kind]}." for label, reply in replies for kind in fatal if kind in reply]
        if refused:
            raise UserError("\n".join(refused))


def _unlike(names: list[str]) -> tuple[str, ...]:
    """Return names that differ: the second of the same gets _2 at its end."""
    counts = [names[: at + 1].count(name) for at, name in enumerate(names)]
    return tuple(name if count == 1 else f"{name}_{count}" for name, count in zip(names, counts, strict=True))


def _failure(child: RewardChild, prompts: Sequence[Any]) -> str:
    """Return a sentence on a function that failed, with the row that it had read."""
    text = f"reward {child.label}: {child.reply['error']}"
    if not child.row:
        return f"{text}."
    prompt = prompts[child.row - 1]
    prompt = prompt if isinstance(prompt, str) else text_of(prompt[-1:])
    return f"{text}, at completion {child.row} of {len(prompts)}, an answer to {short(prompt)}."
