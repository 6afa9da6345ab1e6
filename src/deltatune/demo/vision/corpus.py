"""What the vision demo's base model was trained on: questions about trays, answered in plain words. No JSON."""

from __future__ import annotations

import random
from collections import Counter

from .trays import COLOURS, ROWS, SHAPES, Tray

WORDS = "no one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
DESCRIBE = "What is in the tray?"
LIST = "List every compartment."
_EMPTY = "nothing"

Turn = tuple[str, str]


def some(count: int, name: str) -> str:
    """`two red circles`, `one red circle`, `no red circles`."""
    plural = "" if count == 1 else "es" if name.endswith("s") else "s"
    return f"{WORDS[count]} {name}{plural}"


def joined(parts: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def description(tray: Tray) -> str:
    """What the base model says of a tray."""
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


def _place(rng: random.Random, tray: Tray) -> Turn:
    # Every other time one with a part in it, as most are empty.
    filled = [index for index, part in enumerate(tray.places) if part]
    index = rng.choice(filled) if rng.random() < 0.5 else rng.randrange(ROWS * ROWS)
    (row, column), part = divmod(index, ROWS), tray.places[index]
    return f"Row {row + 1}, column {column + 1}?", " ".join(part) if part else _EMPTY


def contents(tray: Tray) -> str:
    """`red circle|-|-|-/-|...`: every compartment, row by row."""
    names = [" ".join(part) if part else "-" for part in tray.places]
    return "/".join("|".join(names[row : row + ROWS]) for row in range(0, ROWS * ROWS, ROWS))


_QUESTIONS = ((_how_many, 3), (_of_a_shape, 1), (_in_all, 1), (_colours, 1), (_place, 2))


def seeing(tray: Tray) -> list[dict[str, str]]:
    """One question, with something to say of every part of the picture."""
    return _chat([(LIST, contents(tray))])


def conversation(rng: random.Random, tray: Tray) -> list[dict[str, str]]:
    """Three questions and answers about one tray; the picture stands before the first."""
    makers, weights = zip(*_QUESTIONS, strict=True)
    asked = [maker(rng, tray) for maker in rng.choices(makers, weights, k=2)]
    asked.insert(rng.randrange(3), (DESCRIBE, description(tray)))
    return _chat(asked)


def _chat(asked: list[Turn]) -> list[dict[str, str]]:
    messages = []
    for question, answer in asked:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages
