"""The task of the demo: to turn a message at a café counter into one strict JSON call for the till.

Every message and its answer are drawn from a seed. Held-out messages have names that training never shows. Except for
cancellations, they also have combinations of the other arguments that training never shows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import names
from .names import DAYS, DRINKS, STATES, THINGS


@dataclass(frozen=True)
class CafeMessage:
    """One message and the only answer that counts as right."""

    message: str
    answer: str
    # The name in the message.
    name: str
    # The function that the answer calls.
    tool: str
    # Whether the combination of the other arguments is kept out of training.
    held_out: bool


def _call(tool: str, **arguments: str | int) -> str:
    return json.dumps({"tool": tool, **arguments}, separators=(",", ":"))


def _order(rng: random.Random, name: str) -> CafeMessage:
    drink = rng.choice(DRINKS)
    count = rng.randint(1, 9)
    what = f"{count} {drink}" + "s" * (count > 1)
    message = rng.choice(
        (
            f"{what} for {name}, please.",
            f"Could I have {what}? The name is {name}.",
            f"{name} would like {what}.",
            f"Can you bring {what} to {name}?",
            f"We need {what}. Put it on the bill of {name}.",
        )
    )
    held_out = (DRINKS.index(drink) + count) % 8 == 0
    return CafeMessage(message, _call("order", name=name, drink=drink, count=count), name, "order", held_out)


def _reserve(rng: random.Random, name: str) -> CafeMessage:
    guests = rng.randint(2, 9)
    day = rng.choice(DAYS)
    message = rng.choice(
        (
            f"A table for {guests} on {day}, please. My name is {name}.",
            f"{name} wants to come on {day} with {guests} people.",
            f"Please keep a table for {name}: {guests} guests, {day}.",
            f"On {day} we will be {guests}. Ask for {name}.",
            f"Book {day} for {guests}, name of {name}.",
        )
    )
    held_out = (DAYS.index(day) + guests) % 7 == 0
    return CafeMessage(message, _call("reserve", name=name, day=day, guests=guests), name, "reserve", held_out)


def _cancel(rng: random.Random, name: str) -> CafeMessage:
    day = rng.choice(DAYS)
    message = rng.choice(
        (
            f"{name} can't come on {day}, sorry.",
            f"Please cancel the table of {name} on {day}.",
            f"This is {name}. {day} is off, I am ill.",
            f"We don't need the table on {day} any more. It was under {name}.",
            f"Forget about {day}, {name} has to work.",
        )
    )
    return CafeMessage(message, _call("cancel", name=name, day=day), name, "cancel", False)


def _tell(rng: random.Random, name: str) -> CafeMessage:
    thing = rng.choice(THINGS)
    state = rng.choice(STATES)
    text = f"the {thing} is {state}"
    held_out = (THINGS.index(thing) + STATES.index(state)) % 5 == 0
    message = rng.choice(
        (
            f"Tell {name} that {text}.",
            f"Can you let {name} know that {text}?",
            f"Send {name} a note: {text}.",
            f"{name} should hear that {text}.",
        )
    )
    return CafeMessage(message, _call("tell", name=name, text=text), name, "tell", held_out)


KINDS: tuple[Callable[[random.Random, str], CafeMessage], ...] = (_order, _reserve, _cancel, _tell)


def known_name(rng: random.Random) -> str:
    """A name for training; most are invented anew, so that the model learns to copy names and cannot memorise them."""
    kind = rng.random()
    if kind < 0.6:
        return names.spliced(rng)
    return names.invented(rng) if kind < 0.8 else rng.choice((*names.TRAIN, *names.BASE))


def held_out_name(rng: random.Random) -> str:
    """A name that only the test set has."""
    return rng.choice(names.HELD_OUT)


def draw(seed: int, count: int, name: Callable[[random.Random], str], *, held_out: bool) -> list[CafeMessage]:
    """Draw `count` different items; `held_out` selects combinations kept out of training where a tool has any."""
    rng = random.Random(seed)
    items: dict[str, CafeMessage] = {}
    while len(items) < count:
        kind = rng.choice(KINDS)
        item = kind(rng, name(rng))
        while item.held_out != held_out and kind is not _cancel:
            item = kind(rng, name(rng))
        items.setdefault(item.message, item)
    return list(items.values())


def chat(item: CafeMessage) -> dict[str, list[dict[str, str]]]:
    """The item as one line of chat data."""
    return {
        "messages": [
            {"role": "user", "content": item.message},
            {"role": "assistant", "content": item.answer},
        ]
    }


def write(
    directory: Path, *, train: int = 4000, valid: int = 64, test: int = 240, seed: int = 0
) -> dict[str, list[CafeMessage]]:
    """Write train.jsonl, valid.jsonl and test.jsonl; only test.jsonl uses held-out names and combinations."""
    splits = {
        "train": draw(seed, train + valid, known_name, held_out=False),
        "test": draw(seed, test, held_out_name, held_out=True),
    }
    splits["valid"] = splits["train"][train:]
    splits["train"] = splits["train"][:train]
    directory.mkdir(parents=True, exist_ok=True)
    for split, items in splits.items():
        lines = [json.dumps(chat(item)) for item in items]
        (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return splits
