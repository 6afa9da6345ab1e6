"""Draws the training text of the demo's base model: small talk, questions about statements, lists, copying, numbers.

It has plain sentences only, without JSON, tools or messages of the demo's task, and none of the task's names.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from deltatune.demo import names
from deltatune.demo.names import ANIMALS, DAYS, DRINKS, JOBS, PLACES, STATES, THINGS

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HOURS = [*NUMBERS, "ten", "eleven", "twelve"]
SIZES = ("small", "medium", "large")
LEVELS = ("", "very ", "too ", "still ", "not ")
COLOURS = ("red", "green", "blue", "white", "black", "yellow", "brown", "grey")
ACTIONS = ("paint", "clean", "open", "close", "carry", "move", "sell", "repair")

Turn = tuple[str, str]


def _name(rng: random.Random) -> str:
    return rng.choice(names.BASE) if rng.random() < 0.3 else names.invented(rng)


def _people(rng: random.Random, count: int) -> list[str]:
    found: set[str] = set()
    while len(found) < count:
        found.add(_name(rng))
    people = sorted(found)
    rng.shuffle(people)
    return people


def _many(rng: random.Random) -> tuple[str, str]:
    """A random number as a word and as a digit."""
    count = rng.randint(1, 9)
    return NUMBERS[count - 1], str(count)


def _o_clock(rng: random.Random) -> str:
    return rng.choice(("{} o'clock", "quarter past {}", "half past {}", "quarter to {}")).format(rng.choice(HOURS))


def _drinks(rng: random.Random) -> list[Turn]:
    """Questions about a person who has some drinks: who, what, how many, what size."""
    name, (word, digit) = _name(rng), _many(rng)
    drink, size = rng.choice(DRINKS), rng.choice(SIZES)
    plural = drink if word == "one" else f"{drink}s"
    fact = rng.choice(
        (
            f"{name} drank {word} {size} {plural}.",
            f"There are {word} {size} {plural} in front of {name}.",
            f"On the tray of {name} I see {word} {size} {plural}.",
        )
    )
    turns = [
        ("Who is it about?", name),
        ("Who?", name),
        ("Which drink?", drink),
        ("What size?", size),
        ("How many?", word),
        ("How many, in digits?", digit),
        ("Name, drink, size, number?", f"{name}, {drink}, {size}, {digit}"),
        ("Number, drink and name?", f"{digit}, {drink}, {name}"),
        ("Say it shortly.", f"{name}: {digit} {size} {plural}."),
    ]
    return _about(rng, fact, turns)


def _visit(rng: random.Random) -> list[Turn]:
    """Questions about a person who goes somewhere: who, where, which day, what time, with how many."""
    name, (word, digit), day, time = _name(rng), _many(rng), rng.choice(DAYS), _o_clock(rng)
    place = rng.choice(PLACES)
    fact = rng.choice(
        (
            f"{name} goes to the {place} on {day} at {time} with {word} friends.",
            f"On {day} {word} people met {name} in the {place}, at {time}.",
            f"At {time} on {day}, {name} and {word} others were in the {place}.",
        )
    )
    turns = [
        ("Who?", name),
        ("Who is it about?", name),
        ("Which day?", day),
        ("Where?", f"in the {place}"),
        ("What time?", time),
        ("How many others?", word),
        ("How many, in digits?", digit),
        ("Name and day?", f"{name}, {day}"),
        ("Number, day and name?", f"{digit}, {day}, {name}"),
    ]
    return _about(rng, fact, turns)


def _state(rng: random.Random) -> list[Turn]:
    """Questions about a person who says how a thing is: who, what, and the words themselves."""
    name, thing, state, level = _name(rng), rng.choice(THINGS), rng.choice(STATES), rng.choice(LEVELS)
    said = f"the {thing} is {level}{state}"
    fact = rng.choice((f"{name} says: {said}.", f"{name} believes that {said}.", f"According to {name}, {said}."))
    turns = [
        ("Who?", name),
        ("Who is it about?", name),
        ("Which thing?", thing),
        ("How is it?", f"{level}{state}"),
        ("What exactly?", said),
        ("What, and who says so?", f"{said}, {name}"),
    ]
    return _about(rng, fact, turns)


def _about(rng: random.Random, fact: str, turns: list[Turn]) -> list[Turn]:
    chosen = rng.sample(turns, rng.randint(2, 4))
    return [(f"{fact} {chosen[0][0]}", chosen[0][1]), *chosen[1:]]


def _list(rng: random.Random) -> list[Turn]:
    """Questions about a short list of who has what, by person and by thing."""
    people = _people(rng, rng.randint(2, 4))
    things = rng.sample([f"{colour} {animal}" for colour in COLOURS for animal in ANIMALS], len(people))
    pairs = list(zip(people, things, strict=True))
    fact = " ".join(f"{person} has a {thing}." for person, thing in pairs)
    turns = [(f"Who has the {thing}?", person) for person, thing in pairs]
    turns += [(f"And {person}?", f"a {thing}") for person, thing in pairs]
    return _about(rng, fact, turns)


def _job(rng: random.Random) -> list[Turn]:
    people = _people(rng, 2)
    jobs = rng.sample(JOBS, 2)
    fact = f"{people[0]} is a {jobs[0]} and {people[1]} is a {jobs[1]}."
    turns = [(f"Who is the {job}?", person) for person, job in zip(people, jobs, strict=True)]
    turns += [(f"What is {person}?", f"a {job}") for person, job in zip(people, jobs, strict=True)]
    return _about(rng, fact, turns)


def _copy(rng: random.Random) -> list[Turn]:
    """Requests to repeat words, names or plain keys exactly."""
    turns = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.5:
            text = "".join(rng.choices(string.ascii_letters + string.digits + string.punctuation, k=rng.randint(3, 12)))
        elif kind < 0.8:
            text = " ".join(names.invented(rng) for _ in range(rng.randint(1, 3)))
        else:
            words = [*THINGS, *STATES, *PLACES, *ANIMALS, *COLOURS, *DAYS, *NUMBERS]
            text = " ".join(rng.sample(words, rng.randint(2, 5)))
        turns.append((rng.choice(("Type {}", "Repeat {}", "Copy {}", "Say {}")).format(text), text))
    return turns


def _number(rng: random.Random) -> list[Turn]:
    turns = []
    for _ in range(rng.randint(1, 3)):
        word, digit = _many(rng)
        turns.append(rng.choice(((f"{word.capitalize()} in digits?", digit), (f"{digit} in a word?", word))))
    return turns


def _talk(rng: random.Random) -> list[Turn]:
    name = _name(rng)
    return rng.choice(
        (
            [("Hello!", "Hello! What can I do for you?"), ("Who are you?", "I am Pip, a very small model.")],
            [(f"I am {name}.", f"Hello {name}!"), ("What is my name?", f"Your name is {name}.")],
            [(f"My friend is called {name}.", f"{name} is a fine name."), ("Thank you, bye!", "Good bye!")],
            [("Please help me.", "Gladly. What is it about?"), (f"About {name}.", f"I do not know {name}.")],
        )
    )


def _request(rng: random.Random) -> list[Turn]:
    """Requests that a model without tools can only answer in words."""
    name, action, thing = _name(rng), rng.choice(ACTIONS), rng.choice((*THINGS, *ANIMALS))
    if rng.random() < 0.3:
        return [(f"{name} can't {action} the {thing}, sorry.", f"What a pity for {name}.")]
    asked = rng.choice(
        (
            f"Please {action} the {thing}.",
            f"Can you {action} the {thing} of {name}?",
            f"{name} wants you to {action} the {thing}, please.",
            f"We need somebody to {action} the {thing} on {rng.choice(DAYS)}.",
        )
    )
    return [(asked, f"I cannot {action} the {thing}, I can only talk.")]


SKILLS: tuple[tuple[Callable[[random.Random], list[Turn]], int], ...] = (
    (_drinks, 4),
    (_visit, 4),
    (_state, 3),
    (_list, 3),
    (_job, 2),
    (_copy, 5),
    (_number, 2),
    (_request, 2),
    (_talk, 1),
)


def conversation(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """A line of chat data with one or two of these skills."""
    skills, weights = zip(*SKILLS, strict=True)
    turns = [turn for skill in rng.choices(skills, weights, k=rng.randint(1, 2)) for turn in skill(rng)]
    messages = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}
