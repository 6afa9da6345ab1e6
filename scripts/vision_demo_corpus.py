"""Draws the training text of the vision demo's base model: questions about trays, answered without parts lists."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from deltatune.demo.vision.task import QUESTION, WORDS
from deltatune.demo.vision.trays import COLOURS, SHAPES, Tray

_EMPTY = "nothing"

Turn = tuple[str, str]


def some(count: int, name: str) -> str:
    """A number of parts in words: `two red circles`, `one red circle`, `no red circles`."""
    plural = "" if count == 1 else "es" if name.endswith("s") else "s"
    return f"{WORDS[count]} {name}{plural}"


def joined(parts: list[str]) -> str:
    """The items as a list in words: `a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def description(tray: Tray) -> str:
    """The base model's description of a tray."""
    return joined([some(kind.count, kind.name) for kind in tray.kinds])


def _count(number: int) -> str:
    return WORDS[number] if number else "none"


def _how_many(rng: random.Random, tray: Tray) -> Turn:
    kinds = Counter({kind.name: kind.count for kind in tray.kinds})
    if rng.random() < 0.6:
        name = rng.choice(tray.kinds).name
    else:
        name = f"{rng.choice([*COLOURS])} {rng.choice(SHAPES)}"
    return f"How many {some(0, name)[3:]}?", _count(kinds[name])


def _of_a_shape(rng: random.Random, tray: Tray) -> Turn:
    shape = rng.choice(SHAPES)
    total = sum(kind.count for kind in tray.kinds if kind.shape == shape)
    return f"How many {some(0, shape)[3:]}?", _count(total)


def _in_all(rng: random.Random, tray: Tray) -> Turn:
    return "How many in all?", WORDS[sum(kind.count for kind in tray.kinds)]


def _colours(rng: random.Random, tray: Tray) -> Turn:
    shape = rng.choice(SHAPES)
    found = sorted({kind.colour for kind in tray.kinds if kind.shape == shape})
    return f"Which colours are the {some(0, shape)[3:]}?", joined(found) if found else _EMPTY


_Question = Callable[[random.Random, Tray], Turn]
_QUESTIONS: tuple[tuple[_Question, int], ...] = ((_how_many, 3), (_of_a_shape, 1), (_in_all, 1), (_colours, 1))


def seeing(tray: Tray) -> list[dict[str, str]]:
    """A conversation whose one answer describes the whole tray."""
    return _chat([(QUESTION, description(tray))])


def conversation(rng: random.Random, tray: Tray) -> list[dict[str, str]]:
    """A conversation of two questions and answers about one tray; the picture precedes the first question."""
    makers, weights = zip(*_QUESTIONS, strict=True)
    asked = [rng.choices(makers, weights)[0](rng, tray), (QUESTION, description(tray))]
    rng.shuffle(asked)
    return _chat(asked)


def _chat(asked: list[Turn]) -> list[dict[str, str]]:
    messages = []
    for question, answer in asked:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages
