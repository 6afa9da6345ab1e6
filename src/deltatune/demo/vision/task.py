"""The task of the vision demo: to turn a picture of a tray into a parts list in a strict form.

Every picture and its answer are drawn from a seed. A held-out tray has a kind of part in a number that training never
shows: three green squares, for example, where training shows green squares but never three of them.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import trays
from .trays import Tray

QUESTION = "What is in the tray?"
WORDS = "no one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
# Fewer parts of a kind than in the base model's corpus, since the model counts reliably only to three.
MOST = 3


@dataclass(frozen=True)
class TrayPicture:
    """A tray, the file of its picture, and the only answer that counts as right."""

    tray: Tray
    file: Path
    answer: str

    @property
    def group(self) -> str:
        """How many kinds of parts there are; the screen shows one example of each number."""
        return f"{len(self.tray.kinds)} kinds"


def answer(tray: Tray) -> str:
    """The right answer, such as `blue square one, red circle three`, in the order of the tray's kinds."""
    return ", ".join(f"{kind.name} {WORDS[kind.count]}" for kind in tray.kinds)


def draw(seed: int, count: int, *, held_out: bool) -> list[Tray]:
    """Draw `count` different trays with one kind of parts, or two kinds of different colours.

    held_out: whether every tray has a combination that is kept out of training, or none has.
    """
    rng = random.Random(seed)
    drawn: dict[Tray, None] = {}
    while len(drawn) < count:
        tray = trays.draw(rng, rng.choice((1, 2, 2)), MOST)
        distinct_colours = len({kind.colour for kind in tray.kinds}) == len(tray.kinds)
        if distinct_colours and any(kind.held_out for kind in tray.kinds) == held_out:
            drawn[tray] = None
    return list(drawn)


def chat(item: TrayPicture, folder: Path) -> dict[str, Any]:
    """The item as one line of chat data in `folder`."""
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": item.answer}]
    return {"image": str(item.file.relative_to(folder)), "messages": messages}


def write(
    directory: Path, *, train: int = 2400, valid: int = 32, test: int = 120, seed: int = 0
) -> dict[str, list[TrayPicture]]:
    """Write pictures, train.jsonl, valid.jsonl and test.jsonl; only test.jsonl has held-out combinations."""
    seen = draw(seed, train + valid, held_out=False)
    splits: dict[str, list[TrayPicture]] = {}
    for split, part in (
        ("train", seen[:train]),
        ("valid", seen[train:]),
        ("test", draw(seed + 1, test, held_out=True)),
    ):
        (directory / split).mkdir(parents=True, exist_ok=True)
        items = [TrayPicture(tray, directory / split / f"{n:04d}.png", answer(tray)) for n, tray in enumerate(part)]
        for item in items:
            trays.picture(item.tray).save(item.file)
        lines = [json.dumps(chat(item, directory)) for item in items]
        (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        splits[split] = items
    return splits
