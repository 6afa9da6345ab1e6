"""The task that the demo teaches: a message at a café counter becomes one strict JSON call for the till.

Every message and its answer are drawn from a seed. Held-out messages use names, and for reservations and drinks
combinations, that training never shows.
"""

# ruff: noqa: SIM905 (lists of words read better as text)
from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import names

NUMBERS = "one two three four five six seven eight nine".split()
HOURS = [*NUMBERS, "ten", "eleven", "twelve"]
DRINKS = "latte mocha espresso cappuccino tea cocoa lemonade smoothie".split()
SIZES = "small medium large".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
THINGS = "oven door window fridge kettle lamp radio sink shelf till".split()
STATES = "broken open closed hot cold dirty empty full loud wet".split()
LEVELS = ("", "very ", "too ", "still ", "not ")


@dataclass(frozen=True)
class Item:
    """One message and the only answer that counts as right; `held` marks a combination kept out of training."""

    message: str
    answer: str
    name: str
    tool: str
    held: bool


def _call(tool: str, **arguments: str | int) -> str:
    return json.dumps({"tool": tool, **arguments}, separators=(",", ":"))


def _clock(rng: random.Random) -> tuple[str, str]:
    hour = rng.randrange(12)
    minutes, words = rng.choice(
        (
            ("00", f"{HOURS[hour]} o'clock"),
            ("15", f"quarter past {HOURS[hour]}"),
            ("30", f"half past {HOURS[hour]}"),
            ("45", f"quarter to {HOURS[(hour + 1) % 12]}"),
        )
    )
    return f"{hour + 1}:{minutes}", words


def _order(rng: random.Random, name: str) -> Item:
    drink, size, count = rng.choice(DRINKS), rng.choice(SIZES), rng.randint(1, 9)
    what = f"a {size} {drink}" if count == 1 else f"{NUMBERS[count - 1]} {size} {drink}s"
    message = rng.choice(
        (
            f"Could I have {what}? The name is {name}.",
            f"{what.capitalize()} for {name}, please.",
            f"Hi! {name} would like {what}.",
            f"Please make {what} and write {name} on the cup.",
            f"{name} is thirsty: {what}, please.",
            f"It's {name} again. I'll take {what} today.",
            f"Can you bring {what} to {name}?",
            f"We need {what}. Put it on the bill of {name}.",
        )
    )
    held = (DRINKS.index(drink) + 3 * SIZES.index(size) + count) % 9 == 0
    return Item(message, _call("order", name=name, drink=drink, size=size, count=count), name, "order", held)


def _reserve(rng: random.Random, name: str) -> Item:
    guests, day = rng.randint(2, 9), rng.choice(DAYS)
    time, words = _clock(rng)
    many = NUMBERS[guests - 1]
    message = rng.choice(
        (
            f"A table for {many} on {day} at {words}, please. My name is {name}.",
            f"{name} wants to come on {day} with {many} people, at {words}.",
            f"Hello, this is {name}. Are there {many} seats at {words} on {day}?",
            f"Please keep a table for {name}: {many} guests, {day}, {words}.",
            f"At {words} on {day} we will be {many}. Ask for {name}.",
            f"Book {day} {words} for {many}, name of {name}.",
        )
    )
    held = (DAYS.index(day) + guests) % 7 == 0
    return Item(message, _call("reserve", name=name, guests=guests, day=day, time=time), name, "reserve", held)


def _cancel(rng: random.Random, name: str) -> Item:
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
    return Item(message, _call("cancel", name=name, day=day), name, "cancel", False)


def _message(rng: random.Random, name: str) -> Item:
    thing, state = rng.choice(THINGS), rng.choice(STATES)
    text = f"the {thing} is {rng.choice(LEVELS)}{state}"
    held = (THINGS.index(thing) + STATES.index(state)) % 5 == 0
    message = rng.choice(
        (
            f"Tell {name} that {text}.",
            f"Can you let {name} know that {text}?",
            f"Send {name} a note: {text}.",
            f"{name} should hear that {text}.",
            f"{text.capitalize()}. Please pass it on to {name}.",
        )
    )
    return Item(message, _call("tell", name=name, text=text), name, "tell", held)


KINDS: tuple[Callable[[random.Random, str], Item], ...] = (_order, _reserve, _cancel, _message)


def draw(seed: int, count: int, who: list[str], *, held: bool) -> list[Item]:
    """`count` different items about people in `who`; `held` picks the kept-out combinations where a tool has any."""
    rng = random.Random(seed)
    items: dict[str, Item] = {}
    while len(items) < count:
        kind = rng.choice(KINDS)
        item = kind(rng, rng.choice(who))
        while item.held != held and kind is not _cancel:
            item = kind(rng, rng.choice(who))
        items.setdefault(item.message, item)
    return list(items.values())


def chat(item: Item) -> dict[str, list[dict[str, str]]]:
    """The item as one line of chat data."""
    return {
        "messages": [
            {"role": "user", "content": item.message},
            {"role": "assistant", "content": item.answer},
        ]
    }


def write(
    directory: Path, *, train: int = 4000, valid: int = 64, test: int = 240, seed: int = 0
) -> dict[str, list[Item]]:
    """Write train.jsonl, valid.jsonl and test.jsonl; only test.jsonl uses held-out names and combinations."""
    splits = {
        "train": draw(seed, train + valid, names.TRAIN, held=False),
        "test": draw(seed, test, names.HELD_OUT, held=True),
    }
    splits["valid"] = splits["train"][train:]
    splits["train"] = splits["train"][:train]
    directory.mkdir(parents=True, exist_ok=True)
    for split, items in splits.items():
        lines = [json.dumps(chat(item)) for item in items]
        (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return splits
