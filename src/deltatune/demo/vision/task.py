"""The task that the vision demo teaches: a picture of a tray becomes one line of a parts list, in a strict form.

Every picture and its answer are drawn from a seed. A held-out tray has a kind of part in a number of which training
never shows it: three green squares, say, where training shows green squares, but never three.
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
# Fewer than the base has met: it counts to three reliably, and by colour.
MOST = 3


@dataclass(frozen=True)
class TrayPicture:
    """One picture, by its file, and the only answer that counts as right."""

    tray: Tray
    file: Path
    answer: str

    @property
    def group(self) -> str:
        """Items of one group are alike: one of each is shown."""
        return f"{len(self.tray.kinds)} kinds"


def answer(tray: Tray) -> str:
    """`blue square one, red circle three`, in the order of the tray's kinds."""
    return ", ".join(f"{kind.name} {WORDS[kind.count]}" for kind in tray.kinds)


def draw(seed: int, count: int, *, held: bool) -> list[Tray]:
    """`count` different trays of one kind, or of two in different colours.

    held: whether each has a combination that is kept out of training, or none has.
    """
    rng = random.Random(seed)
    found: dict[Tray, None] = {}
    while len(found) < count:
        tray = trays.draw(rng, rng.choice((1, 2, 2)), MOST)
        easy = len({kind.colour for kind in tray.kinds}) == len(tray.kinds)
        if easy and any(kind.held for kind in tray.kinds) == held:
            found[tray] = None
    return list(found)


def chat(item: TrayPicture, folder: Path) -> dict[str, Any]:
    """The item as one line of chat data in `folder`."""
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": item.answer}]
    return {"image": str(item.file.relative_to(folder)), "messages": messages}


def write(
    directory: Path, *, train: int = 2400, valid: int = 32, test: int = 120, seed: int = 0
) -> dict[str, list[TrayPicture]]:
    """Write pictures, train.jsonl, valid.jsonl and test.jsonl; only test.jsonl has held-out combinations."""
    seen = draw(seed, train + valid, held=False)
    splits: dict[str, list[TrayPicture]] = {}
    for split, found in (("train", seen[:train]), ("valid", seen[train:]), ("test", draw(seed + 1, test, held=True))):
        (directory / split).mkdir(parents=True, exist_ok=True)
        items = [TrayPicture(tray, directory / split / f"{n:04d}.png", answer(tray)) for n, tray in enumerate(found)]
        for item in items:
            trays.picture(item.tray).save(item.file)
        lines = [json.dumps(chat(item, directory)) for item in items]
        (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        splits[split] = items
    return splits
