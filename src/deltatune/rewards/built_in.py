"""The built-in reward functions; reward_process.py runs them, so this file imports nothing of deltatune.

Their arguments are those of a reward function in a file, and `argument`, the text that stands behind the name and a
colon. All of them take no completions, too, which checks that text.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

# A program writes a number a line.
_LARGEST_OUTPUT = 1 << 20
# The packages that a function needs, as pip installs them.
EXTRAS = {"math-verify": "math-verify[antlr4_13_2]", "reasoning-gym": "reasoning-gym"}


def text_of(completion: Any) -> str:
    """Return the text of a completion: itself, or the contents of its messages."""
    if isinstance(completion, str):
        return completion
    contents = [message.get("content") or "" for message in completion]
    parts = [[{"text": content}] if isinstance(content, str) else content for content in contents]
    return "".join(part.get("text", "") for content in parts for part in content)


def exact(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    """1 where the completion is the answer, blanks around both aside; else 0."""
    pairs = zip(map(text_of, completions), map(str, answer), strict=True)
    return [float(text.strip() == right.strip()) for text, right in pairs]


def marked(completions: Sequence[Any], answer: Sequence[Any], *, argument: str = "####") -> list[float]:
    """1 where the line behind the last mark is the answer, which may have a mark too; else 0."""

    def behind(text: str) -> str:
        return (text.rpartition(argument)[2].strip().splitlines() or [""])[0].strip()

    pairs = zip(map(text_of, completions), map(str, answer), strict=True)
    return [float(argument in text and behind(text) == behind(right)) for text, right in pairs]


def regex(completions: Sequence[Any], *, argument: str) -> list[float]:
    """1 where the regular expression matches a part of the completion, else 0."""
    pattern = re.compile(argument)
    return [float(pattern.search(text_of(completion)) is not None) for completion in completions]


def json_object(completions: Sequence[Any], *, argument: str = "") -> list[float]:
    """1 where the completion is a JSON object that has all of the fields, else 0."""
    fields = {field.strip() for field in argument.split(",") if field.strip()}

    def score(text: str) -> float:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return 0.0
        return float(isinstance(value, Mapping) and fields <= value.keys())

    return [score(text_of(completion)) for completion in completions]


def length(completion_ids: Sequence[Sequence[int]], *, argument: str) -> list[float]:
    """0 up to the limit in tokens, then falling in a line to -1 at twice the limit."""
    limit = _count(argument)
    return [max(-1.0, min(0, limit - len(tokens)) / limit) for tokens in completion_ids]


def repetition(completion_ids: Sequence[Sequence[int]], *, argument: str = "3") -> list[float]:
    """Minus the share of runs of N tokens that stood in the completion before (appendix C.2 of arXiv:2502.03373)."""
    size = _count(argument)

    def score(tokens: Sequence[int]) -> float:
        runs = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
        return len(set(runs)) / len(runs) - 1 if runs else 0.0

    return list(map(score, completion_ids))


def math_verify(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the completion's formula equals the answer's, by math-verify, else 0; None where the answer has none."""
    from math_verify import parse, verify

    # A formula without dollars is none to math-verify.
    right = [parse(str(text)) or parse(f"${text}$") for text in answer]
    pairs = zip(map(text_of, completions), right, strict=True)
    return [float(verify(formula, parse(text))) if formula else None for text, formula in pairs]


def reasoning_gym(
    completions: Sequence[Any], answer: Sequence[Any], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The score that reasoning-gym gives for its tasks."""
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    def score(text: str, right: Any, about: Mapping[str, Any]) -> float:
        task = get_score_answer_fn(about["source_dataset"])
        return float(task(extract_answer(text) or text, {"answer": right, "metadata": about}))

    return list(map(score, map(text_of, completions), answer, metadata))


def command(*, argument: str, **columns: Sequence[Any]) -> list[Any]:
    """The numbers that a program writes, a line for each completion, which it reads as a line of JSON."""
    names = [name.removesuffix("s") if name in ("prompts", "completions") else name for name in columns]
    with tempfile.TemporaryFile("w+") as lines:
        for row in zip(*columns.values(), strict=True):
            lines.write(json.dumps(dict(zip(names, row, strict=True))) + "\n")
        lines.seek(0)
        with subprocess.Popen(shlex.split(argument), stdin=lines, stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            output = program.stdout.read(_LARGEST_OUTPUT + 1)
            if len(output) > _LARGEST_OUTPUT:
                program.kill()
                raise ValueError(f"the output has more than {_LARGEST_OUTPUT:,} bytes")
    if program.returncode:
        raise ValueError(f"the program ended with exit code {program.returncode}")
    return [json.loads(line) for line in output.splitlines() if line.strip()]


BUILT_IN: dict[str, Callable[..., Any]] = {
    "exact": exact,
    "marked": marked,
    "regex": regex,
    "json": json_object,
    "length": length,
    "repetition": repetition,
    "math-verify": math_verify,
    "reasoning-gym": reasoning_gym,
    "command": command,
}


def built_in(name: str, argument: str) -> Callable[..., Any]:
    """Return the function of a name with the text behind it, if any; ValueError where it takes none, or needs one."""
    parameter = inspect.signature(BUILT_IN[name]).parameters.get("argument")
    if argument and parameter is None:
        raise ValueError(f"expected nothing behind its name, got {argument!r}")
    if not argument and parameter is not None and parameter.default is parameter.empty:
        raise ValueError(f"expected a text behind its name, as {name}:TEXT")
    return partial(BUILT_IN[name], argument=argument) if argument else BUILT_IN[name]


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise ValueError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)
