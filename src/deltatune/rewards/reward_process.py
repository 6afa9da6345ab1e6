"""Runs one reward function in a process of its own; reward_child.py starts main() there.

Standard input brings a byte for each request, and its end ends the process with all that it has started. The request
itself is JSON in a file that both processes have open, behind the number of the row that the function has read last.
Replies are lines of JSON on standard output, one for each request; the output of the function goes to standard error.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .built_in import built_in

#: The bytes of the number before a request: of a row, counted from 1; 0 for none.
HEADER = 8


class RefusedError(Exception):
    """A function cannot be loaded or called at all; the message is for the user."""


class _Rows(list[Any]):
    """The values of a column by row; it notes the row that a function reads, until it has read the last one."""

    def __init__(self, values: Sequence[Any], note: Callable[[int], None]):
        super().__init__(values)
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        for row, value in enumerate(super().__iter__(), 1):
            self._note(row)
            yield value
        self._note(0)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int):
            self._note(at % max(1, len(self)) + 1)
        return super().__getitem__(at)


def main(target: str, argument: str, shared: str) -> None:
    """Answer requests with a reward function, which the first of them loads.

    `target` and `argument` are those of RewardChild, and `shared` is the descriptor of the file that holds the request.
    """
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(os.dup(0), requests), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    process = os.getpid()
    while True:
        requests.get()
        reply = _reply(target, argument, int(shared))
        # A copy that the function has made of this process by fork() ends where the function returns.
        if os.getpid() != process:
            os._exit(0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _listen(pipe: int, requests: queue.SimpleQueue[None]) -> None:
    """Pass requests on; at the end of the program that writes them, end the group of this process."""
    while os.read(pipe, 1):
        requests.put(None)
    os.killpg(os.getpid(), signal.SIGKILL)


def _reply(target: str, argument: str, shared: int) -> dict[str, Any]:
    """Return rewards, an error, or both where some rewards are none; an empty request loads the function alone."""

    def note(row: int) -> None:
        os.pwrite(shared, row.to_bytes(HEADER, sys.byteorder), 0)

    request = os.pread(shared, os.fstat(shared).st_size, HEADER)
    try:
        function = _load(target, argument)
        if not request:
            return {}
        values = json.loads(request)
        count = len(values["completions"])
        arguments = _arguments(function, {name: _Rows(column, note) for name, column in values.items()})
        rewards = function(**arguments)
        if inspect.iscoroutine(rewards):
            import asyncio

            rewards = asyncio.run(rewards)
        return _checked(rewards, count, note)
    except RefusedError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 (a function of the user may raise anything)
        return {"error": f"raised {_described(error, target)}"}


@cache
def _load(target: str, argument: str) -> Callable[..., Any]:
    if not target.endswith(".py"):
        return built_in(target, argument)
    functions = vars(_module(target))
    if not callable(functions.get(argument)):
        known = [name for name, value in functions.items() if inspect.isfunction(value) and not name.startswith("_")]
        raise RefusedError(f"the file has no function {argument!r}; it has {', '.join(known) or 'none'}")
    return functions[argument]


def _module(path: str) -> Any:
    """Import a file of Python, which may import the files beside it."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise RefusedError(f"{error.filename}, line {error.lineno}, is not Python: {error.msg}; mend it") from error
    except Exception as error:
        raise RefusedError(f"the file cannot be imported: {_described(error, path)}; mend it") from error
    return module


def _arguments(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function takes; RefusedError where it needs one that is no column of the data."""
    signature = inspect.signature(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    taken = {name: value for name, value in values.items() if takes_all or name in signature.parameters}
    try:
        signature.bind(**taken)
    except TypeError as error:
        raise RefusedError(f"{error}; the arguments and columns here are {', '.join(values)}") from error
    return taken


def _checked(rewards: Any, count: int, note: Callable[[int], None]) -> dict[str, Any]:
    """Return the reply for the result of a function, and note the first row that has no reward."""
    if isinstance(rewards, str | bytes | Mapping) or not hasattr(rewards, "__iter__"):
        return {"error": f"returned {_short(rewards)}, and a list of {count} rewards was expected"}
    rewards = list(rewards)
    if len(rewards) != count:
        return {"error": f"returned {len(rewards)} rewards for {count} completions"}
    numbers = [None if reward is None else _number(reward) for reward in rewards]
    wrong = [row for row, number in enumerate(numbers) if number is not None and not math.isfinite(number)]
    if not wrong:
        return {"rewards": numbers}
    note(wrong[0] + 1)
    error = f"returned {_short(rewards[wrong[0]])}, and a finite number or None was expected"
    return {"rewards": [None if row in wrong else number for row, number in enumerate(numbers)], "error": error}


def _number(reward: Any) -> float:
    """Return a reward as a number; NaN for a value that is none."""
    try:
        return math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]} ..."


def _described(error: BaseException, file: str) -> str:
    """Return the type and the message of an error, with the last line of the user's file on its way."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == os.path.abspath(file)]
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}{f': {text}' if text else ''}{f' ({file}, line {lines[-1]})' if lines else ''}"
