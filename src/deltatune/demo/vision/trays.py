"""Pictures of sorting trays: 4 x 4 compartments with small coloured parts in some of them, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

COLOURS = {
    "red": (214, 40, 40),
    "green": (38, 150, 60),
    "blue": (40, 80, 214),
    "yellow": (240, 196, 20),
    "black": (30, 30, 34),
}
SHAPES = ("circle", "square", "triangle", "cross")
MOST = 4
ROWS = 4
COMPARTMENT = 16
SIDE = ROWS * COMPARTMENT
# Drawn this many times larger and scaled down, so that edges are smooth.
_FINE = 4


@dataclass(frozen=True, order=True)
class Kind:
    """Parts of one kind: `count` of them."""

    colour: str
    shape: str
    count: int

    @property
    def name(self) -> str:
        """Colour and shape, in the singular."""
        return f"{self.colour} {self.shape}"

    @property
    def held(self) -> bool:
        """Whether so many of this kind are kept out of fine-tuning: about an eighth of all combinations."""
        return ([*COLOURS].index(self.colour) + 2 * SHAPES.index(self.shape) + self.count) % 8 == 0


@dataclass(frozen=True)
class Tray:
    """kinds: what lies in it, by colour and shape in alphabetical order. places: (colour, shape) or None, row by row.

    look: the seed of all that a picture shows beside that: light, sizes, where in its compartment each part lies.
    """

    kinds: tuple[Kind, ...]
    parts: tuple[tuple[str, str] | None, ...]
    look: int


def draw(rng: random.Random, kinds: int, most: int = MOST) -> Tray:
    """A tray of so many kinds of parts, 1 to `most` of each, anywhere."""
    every = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    found = tuple(sorted(Kind(*each, rng.randint(1, most)) for each in rng.sample(every, kinds)))
    parts: list[tuple[str, str] | None] = [(kind.colour, kind.shape) for kind in found for _ in range(kind.count)]
    parts += [None] * (ROWS * ROWS - len(parts))
    rng.shuffle(parts)
    return Tray(found, tuple(parts), rng.getrandbits(32))


def picture(tray: Tray) -> Any:
    """The tray as a Pillow image, 64 x 64 pixels, RGB."""
    from PIL import Image, ImageDraw

    rng = random.Random(tray.look)
    light = rng.uniform(0.82, 1.0)
    ground = tuple(round(light * rng.randint(222, 250)) for _ in range(3))
    image = Image.new("RGB", (SIDE * _FINE, SIDE * _FINE), ground)
    pen = ImageDraw.Draw(image)
    for index, part in enumerate(tray.parts):
        if part is None:
            continue
        row, column = divmod(index, ROWS)
        radius = rng.uniform(4.8, 6.4)
        room = COMPARTMENT / 2 - radius
        x, y = ((place + 0.5) * COMPARTMENT + rng.uniform(-room, room) for place in (column, row))
        colour = tuple(min(255, max(0, round(light * value + rng.gauss(0, 9)))) for value in COLOURS[part[0]])
        _part(pen, part[1], x * _FINE, y * _FINE, radius * _FINE, colour)
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def _part(pen: Any, shape: str, x: float, y: float, radius: float, colour: tuple[int, ...]) -> None:
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif shape == "square":
        half = 0.86 * radius
        pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, y - radius), (x - radius, y + 0.8 * radius), (x + radius, y + 0.8 * radius)], fill=colour)
    else:
        arm = 0.32 * radius
        pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
        pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
